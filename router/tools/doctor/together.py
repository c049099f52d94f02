"""Turn the facts about several backends into findings.

The findings say which backends can use each other's KV, why others cannot, and whether
`kvferry serve` would start. Pure, except that it checks files, packages and variables on this
machine.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import combinations

from router.assembly.backends import kv_dir_of
from router.base.types import Namespace
from router.config.loader import path_text
from router.config.open_doors import open_doors
from router.config.schema import Config, TokenizerMode
from router.llama.attach.diagnosis import Trouble, Unusable
from router.llama.attach.learning import Attached
from router.llama.attach.namespace import file_name
from router.store import shapes
from router.store.files import openness
from router.store.format.blocks import AttentionBlock
from router.store.format.layout import Layout
from router.tools.doctor.environment import Lack, unset_variables, unusable_parts
from router.tools.doctor.facts import Facts
from router.tools.doctor.findings import Finding, Level, restores


def of_several(all_facts: Sequence[Facts], config: Config) -> list[Finding]:
    """Return the findings about the backends together and about the configuration."""
    return [
        *_duplicates(all_facts),
        *_exchange(all_facts),
        *_streams(all_facts),
        *_folders(all_facts),
        *_settings(config),
        *(Level.WARNING(door.what, door.remedy) for door in open_doors(config)),
        *_lacking(config),
    ]


def verdict(
    all_facts: Sequence[Facts], config: Config, cold: Sequence[Finding] = ()
) -> tuple[int, str]:
    """Return the exit code and the last line of output. `cold`: the findings about the cold tier.

    The code is 1 in four cases: the cold tier or a backend cannot be used; `kvferry serve` would
    not start; the policy moves KV and no backend can restore, although that was tried.
    """
    if any(one.level is Level.ERROR for one in cold):
        return 1, "Not ready: the cold tier cannot be used; see above."
    unusable = [facts.name for facts in all_facts if facts.attached is None]
    refused = [path_text(lack.path) for lack in _lacks(config)]
    refused += [f"kv_dir of {facts.name}" for facts in all_facts if _shut_out(facts, config)]
    able = [facts.name for facts in all_facts if restores(facts)]
    untried = [facts.name for facts in all_facts if facts.untried and facts.name not in able]
    moves_kv = config.policy.name.moves_kv
    if unusable:
        return 1, f"Not ready: {', '.join(unusable)} cannot be used; see above."
    if refused:
        return 1, f"Not ready: `kvferry serve` refuses {_listed(refused)}; see above."
    if not moves_kv:
        return 0, f"Ready. Policy {config.policy.name} never moves KV."
    if untried and not able:
        return 0, f"Ready; saving and restoring were not tried on {_listed(untried)}; see above."
    if not able:
        return 1, "Not ready: no backend can restore KV; see above."
    if len(able) < len(all_facts):
        return 0, f"Ready, but only {', '.join(able)} can restore KV; see above."
    return 0, "Ready: every backend can save and restore KV."


def _shut_out(facts: Facts, config: Config) -> bool:
    """Return whether its kv_dir is needed and unusable; `findings.of_backend` gives details."""
    folder = facts.folder
    if folder is None or kv_dir_of(facts.backend, config) is None:
        return False
    return not folder.usable or openness(folder.mode, group_access=folder.group_access) is not None


def _lacks(config: Config) -> list[Lack]:
    """Return the lacks of this machine, except API keys: `of_backend` reports them."""
    variables = [lack for lack in unset_variables(config) if lack.path[0] != "backends"]
    return variables + unusable_parts(config)


def _lacking(config: Config) -> Iterator[Finding]:
    for lack in _lacks(config):
        what = f"{path_text(lack.path)}: {lack.message}"
        yield Level.ERROR(what, "`kvferry serve` does not start without it")


def _duplicates(all_facts: Sequence[Facts]) -> Iterator[Finding]:
    for a, b in combinations(all_facts, 2):
        if a.props is None or b.props is None:
            continue
        if a.props.process == b.props.process and not a.props.told_by_nothing:
            what = f"{a.name} and {b.name} seem to be one and the same server (equal media_marker)"
            do = f"{Unusable(Trouble.TWIN).do}; `kvferry serve` uses only one of them"
            yield Level.WARNING(what, do)


def _groups(all_facts: Sequence[Facts]) -> list[list[Facts]]:
    groups: dict[Namespace, list[Facts]] = {}
    for facts in all_facts:
        if facts.attached is not None and not facts.untried:
            groups.setdefault(facts.attached.info.namespace, []).append(facts)
    return sorted(groups.values(), key=len, reverse=True)


def _exchange(all_facts: Sequence[Facts]) -> Iterator[Finding]:
    groups = _groups(all_facts)
    for group in groups:
        names = [facts.name for facts in group if restores(facts)]
        if len(names) > 1:
            yield Level.OK(f"{_listed(names)} can use each other's KV")
    # Compare only with the largest group: all pairs of five servers would be ten findings.
    for other in groups[1:]:
        for level, what, do in differences(groups[0][0], other[0]):
            ours, theirs = ([facts.name for facts in group] for group in (groups[0], other))
            yield level(f"{_listed(theirs)} cannot use the KV of {_listed(ours)}: {what}", do)


def differences(a: Facts, b: Facts) -> list[tuple[Level, str, str]]:
    """Return why `a` and `b` are in different namespaces, and the remedy for each reason.

    Only the first of these is reported, since later ones follow from it: (1) another model;
    (2) other adapters; (3) a state file that could not be read; (4) other layouts of state files;
    (5) a model that predicts other tokens.
    """
    assert a.attached is not None
    assert b.attached is not None
    if reason := _models(a.attached, b.attached):  # (1)
        do = "nothing if this is intended; else start both with the same -m FILE"
        return [(Level.NOTE, reason, do)]
    if a.attached.lora != b.attached.lora:  # (2)
        do = "nothing if this is intended; else start both with the same --lora"
        return [(Level.NOTE, "they have different LoRA adapters", do)]
    ours, theirs = a.attached.probe.layout, b.attached.probe.layout
    if ours is None or theirs is None:  # (3)
        name = a.name if ours is None else b.name
        return [(Level.WARNING, f"no state file of {name} could be read", "see its own findings")]
    if found := list(_layouts(ours, theirs)):  # (4)
        return [(Level.WARNING, what, do) for what, do in found]
    what = "their models have equal names and sizes, but predict different tokens"  # (5)
    do = "start both with the same file and the same --rope-*, --yarn-* and --control-vector flags"
    return [(Level.WARNING, what, do)]


def _models(a: Attached, b: Attached) -> str:
    ours, theirs = file_name(a.props.model_path), file_name(b.props.model_path)
    if ours != theirs:
        return f"different model files ({ours}, {theirs})"
    facts = [(m.n_vocab, m.n_embd, m.n_params, m.size, m.ftype) for m in (a.models, b.models)]
    return "" if facts[0] == facts[1] else f"different models, although both files are named {ours}"


def _layouts(a: Layout, b: Layout) -> Iterator[tuple[str, str]]:
    if a.is_opaque or b.is_opaque:
        if a.is_opaque != b.is_opaque:
            yield "their state files have different layouts", "start both with the same flags"
        return
    ours, theirs = _first(a), _first(b)
    if ours is None or theirs is None:
        if a.fingerprint() != b.fingerprint():
            yield "their recurrent states differ", "start both with the same flags"
        return
    for index, letter in enumerate("kv"):
        types = [shapes.cache_types(layout)[index] for layout in (a, b)]
        if types[0] != types[1]:
            flag = f"-ct{letter}"
            yield (
                f"their {letter.upper()} caches have different types ({', '.join(types)})",
                f"start both with the same {flag}",
            )
    if ours.v_trans != theirs.v_trans:
        yield "flash attention is on for one of them only", "start both with -fa on (or both off)"
    if a.fingerprint() != b.fingerprint() and ours.describe() == theirs.describe():
        yield "their state files have different layouts", "start both with the same flags"


def _first(layout: Layout) -> AttentionBlock | None:
    return next((block for block in layout.attention if block.cell_count), None)


def _streams(all_facts: Sequence[Facts]) -> Iterator[Finding]:
    """Yield a note if states must be restreamed between servers."""
    for group in _groups(all_facts):
        by_number: dict[int, list[str]] = {}
        for facts in group:
            if facts.attached is not None and restores(facts):
                by_number.setdefault(facts.attached.info.n_stream, []).append(facts.name)
        if len(by_number) > 1:
            files = [f"{n} ({_listed(names)})" for n, names in sorted(by_number.items())]
            yield Level.NOTE(
                "states are restreamed between servers with different numbers of streams: "
                f"{', '.join(files)}",
                "give all servers the same -np, and all --kv-unified or all --no-kv-unified",
            )


def _folders(all_facts: Sequence[Facts]) -> Iterator[Finding]:
    """Yield a note if states must be linked or copied between KV directories."""
    for group in _groups(all_facts):
        folders = {
            facts.folder.identity: str(facts.backend.kv_dir)
            for facts in group
            if facts.folder is not None and restores(facts)
        }
        if len(folders) < 2:
            continue
        copied = len({device for device, _ in folders}) > 1
        how, do = "linked", ""
        if copied:
            how, do = "copied", "give all servers one --slot-save-path, so that nothing is copied"
        what = f"states are {how} between {_listed(list(folders.values()))}"
        yield Level.NOTE(what, do)


def _settings(config: Config) -> Iterator[Finding]:
    if not config.policy.name.moves_kv:
        return
    if not config.store.enabled:
        yield Level.WARNING(
            "the store is off: nothing is saved",
            "set store.max_bytes and store.max_tokens above 0, or to -1 for no limit",
        )
    if not config.probe.enabled:
        yield Level.WARNING(
            "probe.enabled is false: `kvferry serve` does not learn what its backends can do, and "
            "restores nothing",
            "remove the key, or set probe.enabled: true",
        )
    if config.tokenizer.mode is TokenizerMode.OFF:
        yield Level.WARNING(
            "tokenizer.mode is off: prompts are not tokenized, so nothing is reused",
            "remove the key, or set tokenizer.mode: backend",
        )


def _listed(names: Sequence[str]) -> str:
    """Join names as `a, b and c`."""
    return re.sub(r", ([^,]*)$", r" and \1", ", ".join(names))
