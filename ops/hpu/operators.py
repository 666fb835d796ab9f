"""Looks up the operators of Gaudi's software that we call, and checks the schema that we rely on.

Gaudi's software is closed, and its operators change between versions. Each is looked up once at start. If it is missing
or takes other arguments, torch's own operators compute it instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

Call = Callable[..., Any]

BRIDGE = "habana_frameworks.torch"
OPERATORS = "torch.ops.hpu"
# A parameter of this type accepts our argument: torch's name for `Scalar`.
_NUMBER = "number"


class Resolution(NamedTuple):
    """call: the operator; None if torch's own operators compute it. why: what was found, or why it is not used."""

    call: Call | None
    why: str


class Parameter(NamedTuple):
    """A parameter that an operator declares. type: "" if Python does not tell it."""

    name: str
    type: str
    required: bool
    by_name_only: bool


class _NotUsableError(Exception):
    """Raised with the reason why an operator cannot be used here."""


@dataclass(frozen=True)
class GaudiOperator:
    """An operator as we call it.

    title: its result, for messages.
    module, name: its place: `torch.ops.hpu`, or a module of the bridge's Python wrappers.
    arguments: what we pass, in order, as "TYPE NAME"; "A|B" if the name differs between versions. Wrappers declare no
        types.
    results: tensors that it returns; wrappers do not declare any.
    overload: for an operator that has several.
    by_name: what we pass by keyword, likewise.
    instead: the replacement for this operator.
    """

    title: str
    module: str
    name: str
    arguments: tuple[str, ...]
    instead: str
    results: int = 1
    overload: str = "default"
    by_name: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        return f"{self.module}.{self.name}" + (f".{self.overload}" if self.overload != "default" else "")

    @property
    def signature(self) -> str:
        """Our call of it, for messages."""
        arguments = (argument.partition("|")[0] for argument in (*self.arguments, *self.by_name))
        return f"{self.place}({', '.join(arguments)})"

    def resolve(self) -> Resolution:
        """Looks the operator up. Imports the bridge; without it, no operator is found."""
        try:
            call, declared = self._find()
            parameters = list(declared)
            self._check(parameters)
        except _NotUsableError as error:
            return Resolution(None, str(error))
        return Resolution(call, f"{self.place}({', '.join(parameter.name for parameter in parameters)})")

    def _find(self) -> tuple[Call, Iterator[Parameter]]:
        _import(BRIDGE)
        if self.module == OPERATORS:
            operator = self._operator()
            return operator, _of_schema(operator)
        wrapper = vars(_import(self.module)).get(self.name)
        if wrapper is None:
            raise _NotUsableError(f"{self.module} has no {self.name}")
        if isinstance(wrapper, type) and issubclass(wrapper, torch.autograd.Function):
            return wrapper.apply, _of_python(wrapper.forward, skip=1)
        return wrapper, _of_python(wrapper)

    def _operator(self) -> OpOverload:
        try:
            operator: OpOverload = getattr(getattr(torch.ops.hpu, self.name), self.overload)
        except AttributeError:
            raise _NotUsableError(f"{OPERATORS} has no {self.place.removeprefix(f'{OPERATORS}.')}") from None
        returned = [str(result.type) for result in operator._schema.returns]
        if returned != ["Tensor"] * self.results:
            found = ", ".join(returned) or "nothing"
            raise _NotUsableError(f"{self.place} returns {found}, expected {self.results} x Tensor")
        return operator

    def _check(self, parameters: Sequence[Parameter]) -> None:
        """Checks that our arguments match the parameters and that no others are required."""
        by_place = [parameter for parameter in parameters if not parameter.by_name_only]
        for place, argument in enumerate(self.arguments):
            kind, _, text = argument.rpartition(" ")
            names = text.split("|")
            expected = " or ".join(names)
            if place >= len(by_place):
                raise _NotUsableError(f"{self.place} takes no {expected}")
            found = by_place[place]
            if found.name not in names:
                raise _NotUsableError(f"{self.place}: argument {place + 1} is {found.name}, expected {expected}")
            if not _takes(found.type, kind):
                raise _NotUsableError(f"{self.place}: {found.name} is {found.type}, expected {kind}")
        passed = by_place[: len(self.arguments)]
        declared = {parameter.name: parameter for parameter in parameters}
        for argument in self.by_name:
            kind, _, name = argument.rpartition(" ")
            if name not in declared:
                raise _NotUsableError(f"{self.place} takes no {name}")
            if not _takes(declared[name].type, kind):
                raise _NotUsableError(f"{self.place}: {name} is {declared[name].type}, expected {kind}")
            passed.append(declared[name])
        missing = [parameter.name for parameter in parameters if parameter.required and parameter not in passed]
        if missing:
            raise _NotUsableError(f"{self.place} also needs {', '.join(missing)}, which this plugin does not pass")


def _import(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise _NotUsableError(f"{module} cannot be imported: {error}") from error


def _of_schema(operator: OpOverload) -> Iterator[Parameter]:
    for argument in operator._schema.arguments:
        kind = str(argument.type)
        if kind.startswith("Optional["):
            kind = kind.removeprefix("Optional[").removesuffix("]") + "?"
        yield Parameter(argument.name, kind, not argument.has_default_value(), argument.kwarg_only)


def _of_python(function: Call, skip: int = 0) -> Iterator[Parameter]:
    """Reads the parameters of a Python function. skip: parameters that the caller does not pass, such as the context of
    an autograd function.
    """
    for parameter in list(inspect.signature(function).parameters.values())[skip:]:
        if parameter.kind is parameter.VAR_POSITIONAL:
            raise _NotUsableError(
                f"{function.__qualname__} takes *{parameter.name}, which does not name its parameters"
            )
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        required = parameter.default is parameter.empty
        yield Parameter(parameter.name, "", required, parameter.kind is parameter.KEYWORD_ONLY)


def _takes(declared: str, passed: str) -> bool:
    if not declared or not passed:
        return True
    return passed in (declared, declared.removesuffix("?")) or (passed in ("int", "float") and declared == _NUMBER)


RMS_NORM = GaudiOperator(
    "RMSNorm",
    OPERATORS,
    "rms_norm",
    ("Tensor data_in|x|input", "Tensor gamma", "float epsilon|eps"),
    "torch's operators, in float32",
    results=2,
)
ROTARY = GaudiOperator(
    "rotary embedding",
    OPERATORS,
    "rotary_pos_embedding",
    (
        "Tensor input|x|p",
        "Tensor sin",
        "Tensor cos",
        "Tensor? position_ids|pos",
        "int offset|off",
        "int mode",
    ),
    "torch's operators",
)
FUSED_SDPA = GaudiOperator(
    "attention of one partial",
    f"{BRIDGE}.hpex.kernels",
    "FusedSDPA",
    (
        "q",
        "k",
        "v",
        "attn_mask|mask",
        "dropout_p|dropout",
        "is_causal",
        "scale",
        "softmax_mode",
        "recompute_mode|recompute",
    ),
    "explicit products",
)
_PLAIN = "plain weights, which take twice the memory or more"
CAST_TO_FP8 = GaudiOperator(
    "rounding of rows to 8-bit floats",
    OPERATORS,
    "cast_to_fp8_v2",
    (
        "Tensor input",
        "Tensor? scale",
        "bool stochastic_rounding|stochastic",
        "bool is_amax",
        "int dtype",
    ),
    _PLAIN,
    results=2,
)
FP8_GEMM = GaudiOperator(
    "product of 8-bit floats",
    OPERATORS,
    "fp8_gemm_v2",
    (
        "Tensor A",
        "bool trans_A",
        "Tensor B",
        "bool trans_B",
        "Tensor? D",
        "int out_dtype",
        "Tensor? A_scale_inv",
        "Tensor? B_scale_inv",
        "Tensor? bias",
        "bool accumulate",
    ),
    _PLAIN,
)
CONVERT_FROM_UINT4 = GaudiOperator(
    "weights of 4 bits, written out",
    OPERATORS,
    "convert_from_uint4",
    ("Tensor input", "Tensor scale", "Tensor? zero_point|zero", "int out_dtype|dtype"),
    _PLAIN,
)
_EXPERTS = (
    "Tensor hidden_states",
    "Tensor expert_routing_table",
    "Tensor router_weights",
    "List[Tensor] w12",
    "List[Tensor] w3",
)
EXPERTS = GaudiOperator(
    "mixture of experts",
    OPERATORS,
    "mixture_of_experts",
    (*_EXPERTS, "bool permuted_weights", "str activation", "int experts_min", "int experts_max"),
    "torch's operators, every expert for every row",
    overload="fused_weights",
)
EXPERTS_WITH_BIAS = GaudiOperator(
    "mixture of experts with biases (gpt-oss)",
    OPERATORS,
    "mixture_of_experts",
    (*_EXPERTS, "List[Tensor] w12_bias", "List[Tensor] w3_bias"),
    "torch's operators, every expert for every row",
    overload="bias_fused_weights",
    by_name=("bool permuted_weights", "int experts_min", "int experts_max", "float alpha", "float limit"),
)
EXPERTS_FP8 = GaudiOperator(
    "mixture of experts in 8-bit floats",
    OPERATORS,
    "mixture_of_experts",
    (
        *_EXPERTS,
        "Tensor d_scale_hidden_states",
        "List[Tensor] d_scale_w12",
        "List[Tensor] d_scale_w3",
        "bool permuted_weights",
        "str activation",
        "int experts_min",
        "int experts_max",
    ),
    _PLAIN,
    overload="fp8_fused_weights_dynamic",
)
GAUDI_OPERATORS = (
    RMS_NORM,
    ROTARY,
    FUSED_SDPA,
    CAST_TO_FP8,
    FP8_GEMM,
    CONVERT_FROM_UINT4,
    EXPERTS,
    EXPERTS_WITH_BIAS,
    EXPERTS_FP8,
)
