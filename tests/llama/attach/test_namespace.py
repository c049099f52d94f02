"""Namespaces: backends differ where their states differ, and only there."""

from pathlib import Path

from router.base.types import Namespace
from router.core.model.tenancy import facts_of, is_foreign
from router.llama.attach.namespace import Behaviour, is_same, model_digest, namespace, shown

BEHAVIOUR: Behaviour = [(5, -0.5), (6, -1.5), (7, -2.5), (8, -3.5), (9, -4.5)]


def shifted(by: float, *, behaviour: Behaviour = BEHAVIOUR) -> Behaviour:
    return [(token, logprob + by) for token, logprob in behaviour]


def test_a_new_one_tells_what_it_is_made_of() -> None:
    assert namespace("facts", "", BEHAVIOUR[:2], set()) == "facts:5=-0.500,6=-1.500"


def test_the_same_model_on_other_kernels_is_the_same() -> None:
    known = {namespace("facts", "", BEHAVIOUR, set())}

    assert namespace("facts", "", shifted(0.05), known) in known


def test_another_model_of_the_same_shape_is_another() -> None:
    known = {namespace("facts", "", BEHAVIOUR, set())}

    assert namespace("facts", "", shifted(0.2), known) not in known
    assert namespace("facts", "", [(t + 1, p) for t, p in BEHAVIOUR], known) not in known


def test_other_facts_are_another_whatever_it_does() -> None:
    known = {namespace("facts", "", BEHAVIOUR, set())}

    assert namespace("other", "", BEHAVIOUR, known) not in known


def test_the_tail_may_trade_places() -> None:
    known = {namespace("facts", "", BEHAVIOUR, set())}
    traded = [*BEHAVIOUR[:3], (9, -3.6), (8, -4.4)]

    assert namespace("facts", "", traded, known) in known


def test_no_behaviour_matches_none_only() -> None:
    """A server without probabilities does not match a server that reports them."""
    known = {namespace("facts", "", BEHAVIOUR, set()), Namespace("facts:")}

    assert namespace("facts", "", [], known) == "facts:"
    assert namespace("facts", "", BEHAVIOUR, {Namespace("facts:")}) != "facts:"


def test_hosts_need_not_agree_on_who_probed_first() -> None:
    """Each names the model by its own probe; both names are the same one."""
    here = namespace("facts", "file", BEHAVIOUR, set())
    there = namespace("facts", "file", shifted(0.03), set())

    assert here != there
    assert is_same(here, there)
    assert is_same(there, here)
    assert facts_of(here) == facts_of(there) == "facts"


def test_two_files_that_answer_alike_are_two_models() -> None:
    one, other = (namespace("facts", file, BEHAVIOUR, set()) for file in ("one", "other"))

    assert not is_same(one, other)
    assert namespace("facts", "other", BEHAVIOUR, {one}) == other


def test_a_host_that_cannot_read_the_file_goes_by_the_rest() -> None:
    blind, seeing = (namespace("facts", file, BEHAVIOUR, set()) for file in ("", "file"))

    assert is_same(blind, seeing)
    assert is_same(seeing, blind)


def test_snapshots_under_an_older_name_stay_usable() -> None:
    """Versions before this one did not read the model's file."""
    old = Namespace("facts:5=-0.500,6=-1.500,7=-2.500,8=-3.500,9=-4.500")
    new = namespace("facts", "file", BEHAVIOUR, set())

    assert namespace("facts", "file", BEHAVIOUR, {old}) == old
    assert namespace("facts", "file", BEHAVIOUR, {old, new}) == new


MODEL = bytes(range(256)) * 40_000  # 10 MB: more than the head


def test_a_copy_of_a_model_has_the_same_digest(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    paths = [tmp_path / "a" / "m.gguf", tmp_path / "other.gguf"]
    for path in paths:
        path.write_bytes(MODEL)

    first, second = (model_digest(str(path), len(MODEL)) for path in paths)

    assert first == second != ""


def test_another_tensor_gives_another_digest(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(MODEL)
    before = model_digest(str(path), len(MODEL))
    changed = bytearray(MODEL)
    changed[-100_000:-50_000] = bytes(50_000)
    path.unlink()
    path.write_bytes(changed)

    assert model_digest(str(path), len(MODEL)) != before


def test_the_parts_of_a_split_model_all_count(tmp_path: Path) -> None:
    parts = [tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    for part in parts:
        part.write_bytes(MODEL)
    before = model_digest(str(parts[0]), 2 * len(MODEL))
    parts[1].unlink()
    assert model_digest(str(parts[0]), 2 * len(MODEL)) == ""
    parts[1].write_bytes(MODEL[::-1])

    assert model_digest(str(parts[0]), 2 * len(MODEL)) not in ("", before)


def test_a_file_that_cannot_be_the_servers_is_not_believed(tmp_path: Path) -> None:
    """The path is as seen by the server, which may be on another machine."""
    path = tmp_path / "m.gguf"
    path.write_bytes(MODEL)

    assert model_digest(str(path), len(MODEL) + 1) == ""
    assert model_digest(str(tmp_path / "none.gguf"), 1) == ""


def seen(by: float = 0.0, *, file: str = "", first: int = 5) -> str:
    """Return how a projector is told, as a host measured it."""
    behaviour = [(token - 5 + first, logprob + by) for token, logprob in BEHAVIOUR]
    return f"{file};{shown(behaviour)}"


def of(projector: str) -> Namespace:
    return namespace("facts", "", BEHAVIOUR, set(), projector)


def test_the_same_projector_on_other_kernels_is_the_same() -> None:
    assert is_same(of(seen()), of(seen(0.2)))
    assert is_same(of(seen(file="a")), of(seen(0.2)))


def test_another_projector_makes_another_model() -> None:
    assert not is_same(of(seen()), of(seen(0.5)))
    assert not is_same(of(seen()), of(seen(first=50)))
    assert not is_same(of(seen(file="a")), of(seen(file="b")))
    assert not is_same(of(seen()), of(""))


def test_an_unknown_projector_is_the_same_in_one_process_only() -> None:
    assert is_same(of("?1"), of("?1"))
    assert not is_same(of("?1"), of("?2"))
    assert not is_same(of("?1"), of(seen()))


def test_other_projectors_are_the_same_model_to_what_asks_for_it() -> None:
    one, other = of(seen()), of(seen(0.5))
    assert facts_of(one) == facts_of(other) == "facts"
    assert is_foreign(one, other)
    assert not is_foreign(one, one)
