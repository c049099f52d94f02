"""jinja2 as llama.cpp renders it: strings are bytes with ASCII rules, and the work is limited.

Where llama.cpp's rule is not known, or work exceeds its limit, rendering raises, and the backend
renders. Source of the rules: common/jinja (value.cpp, string.cpp, runtime.cpp) of b11434.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from jinja2 import TemplateError, Undefined, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_TEMPLATE = 256 * 1024  # characters
# A chat of 500 messages takes some thousand steps; a template may loop twice over its messages.
_MAX_STEPS = 100_000  # loop rounds and calls of one rendering: about 30 ms
_MAX_TEXT = 64 << 20  # bytes of all strings that one rendering makes


class OtherwiseError(TemplateError):
    """Raised where llama.cpp may render something else."""


class TooMuchWorkError(TemplateError):
    """Raised where a template loops or grows beyond any chat's need."""


# --- Strings ------------------------------------------------------------------------------------

_SPACE = " \t\n\v\f\r"  # isspace() in the C locale
_UPPER = {lower: lower - 32 for lower in range(ord("a"), ord("z") + 1)}
_LOWER = {upper: upper + 32 for upper in range(ord("A"), ord("Z") + 1)}
_WORD = re.compile(f"[^{_SPACE}]+")


def _stripped(how: Callable[..., str]) -> Callable[..., str]:
    def stripped(text: str, chars: str | None = None) -> str:
        if chars is not None and not chars.isascii():
            raise OtherwiseError("it would strip bytes")
        return how(text, _SPACE if chars is None else chars)

    return stripped


def _capitalize(text: str) -> str:
    return text[:1].translate(_UPPER) + text[1:].translate(_LOWER)


_METHODS: Mapping[str, Callable[..., Any]] = {
    "strip": _stripped(str.strip),
    "lstrip": _stripped(str.lstrip),
    "rstrip": _stripped(str.rstrip),
    "upper": lambda text: text.translate(_UPPER),
    "lower": lambda text: text.translate(_LOWER),
    "capitalize": _capitalize,
    "title": lambda text: _WORD.sub(lambda word: _capitalize(word.group()), text),
    "startswith": str.startswith,
    "endswith": str.endswith,
    "split": lambda text, separator=" ", most=-1: text.split(separator, most),
    "rsplit": lambda text, separator=" ", most=-1: text.rsplit(separator, most),
}
_OF_DICTS = frozenset(dir(dict))
_FILTERS = {name: _METHODS[name] for name in ("upper", "lower", "capitalize", "title")}
_FILTERS["trim"] = _METHODS["strip"]
# Filters of jinja2 with llama.cpp's result for lists and numbers.
_KEPT = (
    *("abs", "d", "default", "dictsort", "first", "float", "int", "items", "last", "list", "map"),
    *("max", "min", "reject", "rejectattr", "reverse", "safe", "select", "selectattr", "sort"),
    *("string", "unique"),
)
_OF_LISTS = frozenset(("first", "last", "list", "map", "max", "min", "reverse", "sort", "unique"))


class _Generation(Extension):
    """`{% generation %}` marks an answer for training; it prints what is in it."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Environment(ImmutableSandboxedEnvironment):
    """An environment for one template. `begin` starts the account of a rendering."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _Generation],
            optimized=False,
            finalize=self._printed,
        )
        self._steps = self._text = 0
        kept = {name: self.filters[name] for name in _KEPT}
        guarded = {name: _of_lists(kept[name]) for name in _OF_LISTS}
        own: dict[str, Callable[..., Any]] = {
            "length": self._length,
            "count": self._length,
            "replace": self._replace,
            "join": self._join,
            "_joined": self._joined,
            "_rounds": self._rounds,
            "_sliced": _only_ascii,
        }
        unknown = dict.fromkeys(self.filters, _unknown)
        self.filters = unknown | kept | guarded | _FILTERS | own
        self.globals = {"range": self._range, "namespace": Namespace, "dict": dict}
        self.globals["raise_exception"] = _raise

    def begin(self) -> None:
        """Start to count the work of one rendering."""
        self._steps, self._text = _MAX_STEPS, _MAX_TEXT

    def compiled(self, source: str) -> Any:
        """Return the template of a source, its work counted. Raises TemplateError."""
        if len(source) > MAX_TEMPLATE:
            raise TooMuchWorkError(f"it has more than {MAX_TEMPLATE} characters")
        tree = self.parse(source)
        _count_work(tree)
        made = self.template_class.from_code(
            self, self.compile(tree), self.make_globals(None), None
        )
        # Merge the chain of two maps once: jinja2 merges it for each rendering, doubling the time.
        made.globals = dict(made.globals)
        return made

    # -- what templates do -----------------------------------------------------------------------

    def getattr(self, obj: Any, attribute: str) -> Any:
        # The usual cases first: the check for safety takes longer than the rest of a message.
        kind = type(obj)
        if kind is dict and attribute in obj and attribute not in _OF_DICTS:
            return obj[attribute]
        if kind is str:
            return self._method(obj, attribute)
        if kind in (LoopContext, Namespace) and not attribute.startswith("_"):
            try:
                return getattr(obj, attribute)
            except AttributeError:
                return Undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(obj, str):
            if isinstance(argument, str):
                return self._method(obj, argument)
            _only_ascii(obj)
        return super().getitem(obj, argument)

    def _method(self, text: str, name: str) -> Any:
        if name == "replace":
            return partial(self._replace, text)
        method = _METHODS.get(name)
        if method is None:
            return Undefined(name=name, obj=text)
        return partial(method, text)

    def call(self, context: Any, obj: Any, *args: Any, **named: Any) -> Any:
        self._step()
        if type(obj) is partial:  # a method of a string; the check for safety takes longer
            named.pop("_loop_vars", None)  # which jinja2 passes to `Context.call`
            named.pop("_block_vars", None)
            return obj(*args, **named)
        return super().call(context, obj, *args, **named)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and isinstance(left, str | list | tuple):
            self._made(len(left) + len(right))
            return left + right
        if operator != "+" and not (_is_number(left) and _is_number(right) and operator != "**"):
            raise OtherwiseError(f"operator {operator}")
        return super().call_binop(context, operator, left, right)

    # -- filters and globals ---------------------------------------------------------------------

    def _length(self, value: Any) -> int:
        return len(value.encode("utf-8", "surrogatepass")) if isinstance(value, str) else len(value)

    def _replace(self, text: str, old: str, new: str) -> str:
        if not old:
            raise OtherwiseError("it replaces nothing")
        self._made(len(text) + len(text) // len(old) * len(new))
        return text.replace(old, new)

    def _join(self, values: Iterable[Any], between: str = "", attribute: Any = None) -> str:
        if isinstance(values, str) or attribute is not None:
            raise OtherwiseError("it joins characters")
        listed = list(values)
        self._made(len(listed) * len(between))
        return between.join(self._text_of(value) for value in listed)

    def _joined(self, values: list[Any]) -> str:
        return "".join(self._text_of(value) for value in values)

    def _rounds(self, values: Any) -> list[Any]:
        if isinstance(values, str):
            raise OtherwiseError("it loops over bytes")
        listed = list(values)
        self._step(len(listed))
        return listed

    def _range(self, *bounds: int) -> range:
        made = range(*bounds)
        self._step(len(made))
        return made

    # -- the account -----------------------------------------------------------------------------

    def _step(self, n: int = 1) -> None:
        self._steps -= n
        if self._steps < 0:
            raise TooMuchWorkError("too many loop rounds and calls")

    def _made(self, size: int) -> None:
        self._text -= size
        if self._text < 0:
            raise TooMuchWorkError("too much text")

    def _text_of(self, value: Any) -> str:
        return str(self._printed(value))

    def _printed(self, value: Any) -> Any:
        """Return a value that prints as in llama.cpp. Raises OtherwiseError."""
        if isinstance(value, str):
            self._made(len(value))
        elif not (isinstance(value, Undefined) or type(value) is int):
            raise OtherwiseError(f"it prints a {type(value).__name__}")
        return value


def _count_work(tree: nodes.Template) -> None:
    """Let each loop and concatenation go through a filter that counts it; guard slices."""
    for loop in tree.find_all(nodes.For):
        if loop.recursive:
            raise OtherwiseError("a recursive loop")
        loop.iter = _filtered(loop.iter, "_rounds")
    for joined in tree.find_all(nodes.Concat):
        joined.nodes = [_filtered(nodes.List(joined.nodes, lineno=joined.lineno), "_joined")]
    for item in tree.find_all(nodes.Getitem):
        if isinstance(item.arg, nodes.Slice):  # compiled to Python's own, without `getitem`
            item.node = _filtered(item.node, "_sliced")


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    assert isinstance(node, nodes.Expr)
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _only_ascii(value: Any) -> Any:
    """Return a value. Raises OtherwiseError for a string that is not ASCII."""
    if isinstance(value, str) and not value.isascii():
        raise OtherwiseError("a position in bytes")
    return value


def _of_lists(function: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(*args: Any, **named: Any) -> Any:
        if any(isinstance(value, str) for value in args[-1:] + args[:1]):
            raise OtherwiseError("a filter of lists, for a string")
        return function(*args, **named)

    for name, value in vars(function).items():  # pass_context and the like
        setattr(guarded, name, value)
    return guarded


def _unknown(*_args: Any, **_named: Any) -> None:
    raise OtherwiseError("a filter with other rules")


def _raise(message: str) -> None:
    raise TemplateError(message)
