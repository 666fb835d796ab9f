"""Signatures of functions as sources have them: as text, and as `inspect.Signature`, which calls are bound to."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from inspect import Parameter, Signature

_DEFAULT = object()
ANY_NUMBER = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
BY_PLACE = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Call:
    """Arguments of a call. Arguments after a star are unknown: one may stand for any number."""

    positional: int
    keywords: tuple[str, ...]
    has_star: bool
    has_stars: bool

    @classmethod
    def of(cls, node: ast.Call) -> Call:
        stars = [arg for arg in node.args if isinstance(arg, ast.Starred)]
        keywords = tuple(keyword.arg for keyword in node.keywords if keyword.arg is not None)
        return cls(len(node.args) - len(stars), keywords, bool(stars), len(keywords) < len(node.keywords))

    def problem(self, signature: Signature) -> str | None:
        """Returns why a function with this signature cannot be called this way; None if it can."""
        parameters = list(signature.parameters.values())
        if self.has_star or self.has_stars:
            # the starred arguments may include the missing ones
            parameters = [one.replace(default=_DEFAULT) if one.kind not in ANY_NUMBER else one for one in parameters]
            signature = Signature(parameters)
        try:
            signature.bind(*[None] * self.positional, **dict.fromkeys(self.keywords))
        except TypeError as error:
            return str(error)
        return None


def signature_of(arguments: ast.arguments, *, bound: bool = False) -> Signature:
    """The parameters of a function. bound: without the first one, which the object takes."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = len(positional) - len(arguments.defaults)
    parameters = [
        Parameter(
            one.arg,
            Parameter.POSITIONAL_ONLY if number < len(arguments.posonlyargs) else Parameter.POSITIONAL_OR_KEYWORD,
            default=_DEFAULT if number >= defaults else Parameter.empty,
        )
        for number, one in enumerate(positional)
    ]
    if arguments.vararg:
        parameters.append(Parameter(arguments.vararg.arg, Parameter.VAR_POSITIONAL))
    for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        kind = Parameter.empty if default is None else _DEFAULT
        parameters.append(Parameter(one.arg, Parameter.KEYWORD_ONLY, default=kind))
    if arguments.kwarg:
        parameters.append(Parameter(arguments.kwarg.arg, Parameter.VAR_KEYWORD))
    if bound and parameters and parameters[0].kind in BY_PLACE:
        del parameters[0]
    return Signature(parameters)


def signature_of_fields(fields: Iterable[tuple[str, bool, bool]]) -> Signature:
    """The constructor of a dataclass. fields: name, whether it has a default, whether it is given by keyword only."""
    by_place: list[Parameter] = []
    by_name: list[Parameter] = []
    for name, has_default, keyword_only in fields:
        kind = Parameter.KEYWORD_ONLY if keyword_only else Parameter.POSITIONAL_OR_KEYWORD
        one = Parameter(name, kind, default=_DEFAULT if has_default else Parameter.empty)
        (by_name if keyword_only else by_place).append(one)
    # a subclass may have fields without a default behind inherited ones with a default only if these are not inherited
    by_place.sort(key=lambda one: one.default is _DEFAULT)
    return Signature([*by_place, *by_name])


def text_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Returns a signature as written, without the quotes of types: `(self, request: Request) -> int`."""
    plain = _WithoutQuotes().visit(ast.parse(ast.unparse(_header(node))))
    text = ast.unparse(plain).removesuffix(":\n    pass")
    return text[text.index("(") :]


def _header(node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.FunctionDef:
    (header,) = ast.parse("def _(): pass").body
    assert isinstance(header, ast.FunctionDef)
    header.args, header.returns = node.args, node.returns
    return header


class _WithoutQuotes(ast.NodeTransformer):
    """Types in quotes as types."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = unquoted(node.annotation)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.returns = unquoted(node.returns)
        self.generic_visit(node)
        return node


def unquoted(annotation: ast.expr | None) -> ast.expr | None:
    """Parses a quoted type; returns any other unchanged."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        try:
            return ast.parse(annotation.value, mode="eval").body
        except SyntaxError:
            return annotation
    return annotation


def is_required(parameter: Parameter | None) -> bool:
    """Returns whether every call must give a parameter; None is one that a function does not have."""
    return parameter is not None and parameter.default is Parameter.empty and parameter.kind not in ANY_NUMBER


def refused_calls(base: Signature, ours: Signature) -> list[str]:
    """Each reason why an overriding method cannot take every call that the overridden one takes. Both are bound."""
    problems = []
    mine = list(ours.parameters.values())
    places = [one for one in mine if one.kind in BY_PLACE]
    takes_any_place = any(one.kind is Parameter.VAR_POSITIONAL for one in mine)
    takes_any_name = any(one.kind is Parameter.VAR_KEYWORD for one in mine)
    for number, one in enumerate(base.parameters.values()):
        if one.kind in ANY_NUMBER:
            continue
        has_place = number < len(places)
        if one.kind in BY_PLACE and not has_place and not takes_any_place:
            problems.append(f"does not take the parameter {one.name}")
        elif one.kind is Parameter.POSITIONAL_OR_KEYWORD and has_place and places[number].name != one.name:
            problems.append(f"calls the parameter {one.name} {places[number].name}")
        elif one.kind is Parameter.KEYWORD_ONLY and one.name not in ours.parameters and not takes_any_name:
            problems.append(f"does not take the parameter {one.name}")
        elif one.default is not Parameter.empty and is_required(ours.parameters.get(one.name)):
            problems.append(f"has no default for the parameter {one.name}")
    more = [one for one in mine if one.name not in base.parameters and one.kind not in ANY_NUMBER]
    number = len([one for one in base.parameters.values() if one.kind in BY_PLACE])
    if any(one.kind in ANY_NUMBER for one in base.parameters.values()):
        # its arguments are unknown
        return problems
    for one in more:
        extra = one.kind is Parameter.KEYWORD_ONLY or places.index(one) >= number
        if extra and one.default is Parameter.empty:
            problems.append(f"needs the parameter {one.name}, which is not passed")
    return problems
