"""The recipe recorder: what makes a recipe another one, what does not, and what counts after warm-up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from vllm_gaudi_ucm_tools.recipes import recorder as recorder_module
from vllm_gaudi_ucm_tools.recipes.recipe import NewRecipe
from vllm_gaudi_ucm_tools.recipes.recorder import RecipeError, RecipeRecorder


@pytest.fixture(params=[False, True], ids=["grad", "inference"])
def mode(request: pytest.FixtureRequest) -> Iterator[None]:
    with torch.inference_mode(request.param):
        yield


def different(*regions: Callable[[], object], device_type: str = "cpu") -> int:
    """How many recipes the regions are."""
    recorder = RecipeRecorder("count", device_type=device_type)
    for region in regions:
        with recorder.recording("region"):
            region()
    return recorder.total


def x(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*(size or (4, 6))).to(dtype)


Change = tuple[Callable[..., object], tuple[Any, ...], Callable[..., object], tuple[Any, ...]]
A, B = x(4, 6), x(4, 6)
CHANGES: dict[str, Change] = {
    "shape": (torch.neg, (x(4, 6),), torch.neg, (x(5, 6),)),
    "dtype": (torch.neg, (x(),), torch.neg, (x(dtype=torch.bfloat16),)),
    "operator": (torch.neg, (x(),), torch.abs, (x(),)),
    "overload": (lambda a: a * 2, (x(),), lambda a: a * a, (x(),)),
    "float": (lambda a: a * 0.7, (x(),), lambda a: a * 0.8, (x(),)),
    "integer": (lambda a: a.sum(0), (x(),), lambda a: a.sum(1), (x(),)),
    "kind of number": (lambda a: a * 2, (x(),), lambda a: a * 2.0, (x(),)),
    "flag": (lambda a: a.sum(0, True), (x(),), lambda a: a.sum(0, False), (x(),)),
    "string": (lambda a: functional.gelu(a), (x(),), lambda a: functional.gelu(a, approximate="tanh"), (x(),)),
    "strides": (torch.neg, (x(4, 6),), torch.neg, (x(6, 4).t(),)),
    "offset": (lambda a: a[:2] + 1, (x(),), lambda a: a[1:3] + 1, (x(),)),
    "order": (lambda a: (a.neg(), a.abs()), (x(),), lambda a: (a.abs(), a.neg()), (x(),)),
    "flow": (lambda a: a.neg() - a.abs(), (x(),), lambda a: _swapped(a), (x(),)),
    "aliasing": (torch.add, (A, A), torch.add, (A, B)),
    "length": (lambda a: a.neg(), (x(),), lambda a: a.neg().neg(), (x(),)),
    "in place": (lambda a: a.add(1), (x(),), lambda a: a.add_(1), (x(),)),
    "container": (lambda a: torch.cat([a, a]), (x(),), lambda a: torch.cat([a, a, a]), (x(),)),
    "number written": (lambda a: a[:2].__setitem__(0, 1.0), (x(),), lambda a: a[:2].__setitem__(0, 2.0), (x(),)),
    "size of a result": (torch.nonzero, (torch.tensor([0, 1]),), torch.nonzero, (torch.tensor([1, 1]),)),
    "copy for a view": (lambda a: a.reshape(24) + 1, (x(4, 6),), lambda a: a.reshape(24) + 1, (x(6, 4).t(),)),
    "host read": (lambda a: a.sum(), (x(),), lambda a: a.sum().item(), (x(),)),
}


def _swapped(a: Tensor) -> Tensor:
    negative, absolute = a.neg(), a.abs()
    return absolute - negative


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_a_new_recipe(change: str) -> None:
    """covers: B1."""
    one, arguments, other, other_arguments = CHANGES[change]
    assert different(lambda: one(*arguments), lambda: other(*other_arguments)) == 2
    again = [argument.clone(memory_format=torch.preserve_format) for argument in arguments]
    if change != "aliasing":
        assert different(lambda: one(*arguments), lambda: one(*again)) == 1


@pytest.mark.usefixtures("mode")
def test_data_and_addresses_are_no_part_of_a_recipe() -> None:
    def region(seed: int) -> Callable[[], Tensor]:
        a = torch.full((4, 6), float(seed))
        return lambda: (a * 2 + a).softmax(-1)[:2].add_(a[2:]).copy_(a[:2])

    assert different(*[region(seed) for seed in range(5)]) == 1


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize(
    "unseen",
    [
        lambda a: a,
        lambda a: a.detach(),
        lambda a: a.view(6, 4).view(4, 6),
        lambda a: a.reshape(2, 12).reshape(4, 6),
        lambda a: a.t().t(),
        lambda a: a.contiguous(),
        lambda a: a.to(torch.float32),
        lambda a: (a.split(2), a)[1],
        lambda a: torch.from_numpy(a.numpy()),
    ],
)
def test_views_and_metadata_are_not_seen(unseen: Callable[[Tensor], Tensor]) -> None:
    a = x()
    assert different(lambda: a.neg(), lambda: unseen(a).neg()) == 1


def test_unseen_operators_do_not_number_memories() -> None:
    a, b = x(), x()
    assert different(lambda: a - b, lambda: (b.view(-1), a - b)) == 1


@pytest.mark.usefixtures("mode")
def test_reused_addresses_do_not_look_like_the_same_memory() -> None:
    """Whether a freed tensor's address comes back is up to the allocator, and no flow of data."""

    def region(keep: bool) -> None:
        kept = []
        for _ in range(20):
            a = torch.from_numpy(torch.zeros(64).numpy().copy()) + 1
            if keep:
                kept.append(a)

    assert different(lambda: region(False), lambda: region(True), lambda: region(False)) == 1


def test_host_work_and_copies_from_the_host_are_not_seen() -> None:
    """With `meta` for a device: only what touches it is recorded, copies to it are data that arrives."""
    a, buffer = torch.empty(4, 6, device="meta"), torch.empty(4, 6, device="meta")

    def staged(rows: int) -> None:
        host = torch.zeros(rows).neg() * 3.5
        torch.add(host, host).to("meta")
        buffer[:2].copy_(torch.ones(2, 6))
        a.add_(buffer)

    assert different(lambda: a.add_(buffer), lambda: staged(3), lambda: staged(4), device_type="meta") == 1
    assert different(lambda: torch.zeros(3).neg(), device_type="meta") == 0


def test_a_host_number_beside_a_devices_tensor_counts_by_value() -> None:
    """A tensor without dimensions of the host becomes an argument of the kernel."""
    a = torch.empty(4, device="meta")
    regions = [lambda value=value: a * torch.tensor(value) for value in (0.5, 0.5, 0.25)]
    assert different(*regions, device_type="meta") == 2


def test_packed_weights_have_no_storage_and_are_told_apart() -> None:
    a, one, other = x(4, 16), *(torch.ops.mkldnn._reorder_linear_weight(x(16, 16), 16) for _ in range(2))

    def region(*weights: Tensor) -> None:
        for weight in weights:
            torch.ops.mkldnn._linear_pointwise(a, weight, None, "none", [], "")

    assert different(lambda: region(one, other), lambda: region(other, one)) == 1
    assert different(lambda: region(one, other), lambda: region(one, one)) == 2


class Step(NamedTuple):
    """One operator of a random program: operands are registers, read as they are or transposed."""

    name: str
    left: int
    right: int
    transposed: bool
    number: float


BINARY: dict[str, Callable[..., Tensor]] = {"add": torch.add, "maximum": torch.maximum, "mm": torch.mm}
NUMBERED: dict[str, Callable[..., Tensor]] = {"add_": Tensor.add_, "times": torch.mul, "clamp": torch.clamp}
OTHER = {"add": "maximum", "maximum": "mm", "mm": "add", "times": "clamp", "clamp": "times"}


@st.composite
def programs(draw: st.DrawFn) -> list[Step]:
    registers, steps = 3, []
    for _ in range(draw(st.integers(1, 8))):
        name = draw(st.sampled_from(sorted({*BINARY, *NUMBERED})))
        left, right = draw(st.integers(0, registers - 1)), draw(st.integers(0, registers - 1))
        steps.append(Step(name, left, right, draw(st.booleans()), draw(st.sampled_from([0.5, 1.0, 2.0]))))
        registers += not name.endswith("_")
    return steps


def run(program: list[Step], dtype: torch.dtype = torch.float32, size: int = 3) -> Callable[[], None]:
    registers = [torch.rand(size, size).to(dtype) for _ in range(3)]

    def region() -> None:
        torch.stack(registers)  # all are seen before, so that taking another one is never only a renaming
        for name, left, right, transposed, number in program:
            first = registers[left].t() if transposed else registers[left]
            result = NUMBERED[name](first, number) if name in NUMBERED else BINARY[name](first, registers[right])
            if not name.endswith("_"):
                registers.append(result)

    return region


@settings(max_examples=150)
@given(programs(), st.data())
def test_equal_programs_are_one_recipe_and_any_change_is_another(program: list[Step], data: st.DataObject) -> None:
    assert different(run(program), run(program)) == 1
    place = data.draw(st.integers(0, len(program) - 1))
    step = program[place]
    registers = 3 + sum(not earlier.name.endswith("_") for earlier in program[:place])
    changes = [
        step._replace(transposed=not step.transposed),
        step._replace(left=(step.left + 1) % registers),
        step._replace(number=step.number + 1)
        if step.name in NUMBERED
        else step._replace(right=(step.right + 1) % registers),
    ]
    if step.name != "add_":  # another operator would make one register more
        changes.append(step._replace(name=OTHER[step.name]))
    changed = data.draw(st.sampled_from(changes))
    assert different(run(program), run([*program[:place], changed, *program[place + 1 :]])) == 2
    assert different(run(program), run(program[:-1])) == 2
    assert different(run(program), run(program, torch.float64), run(program, size=4)) == 3


def transformer(rows: int, temperature: float = 1.0) -> Callable[[], Tensor]:
    """Two layers of attention and a gated product, the way a model runs them."""
    hidden, weights = x(rows, 16), [WEIGHT] * 2

    def region() -> Tensor:
        state = hidden
        for weight in weights:
            query, key, value = functional.linear(functional.layer_norm(state, [16]), weight).split(16, -1)
            scores = (query @ key.t()) * temperature
            state = state + functional.silu(scores.softmax(-1) @ value)
        return state.argmax(-1)

    return region


WEIGHT = x(48, 16)


@pytest.mark.usefixtures("mode")
def test_a_model_at_two_batch_sizes() -> None:
    """covers: B1, B4, B5."""
    recorder = RecipeRecorder("count", device_type="cpu")
    for rows in (4, 8):
        with recorder.recording("forward"):
            transformer(rows)()
    recorder.seal()
    for rows in (8, 4, 4, 8):
        with recorder.recording("forward"):
            transformer(rows)()
    assert (recorder.total, recorder.new_recipes, recorder.last_new) == (2, 0, None)
    for region in (transformer(5), transformer(4, 0.7)):
        with recorder.recording("forward"):
            region()
    assert (recorder.total, recorder.new_recipes) == (4, 2)
    assert recorder.last_new is not None
    assert recorder.last_new.new_operator_count == 1
    assert recorder.last_new.new_operators[0][1].startswith("aten.mul.Tensor[float32[4, 4]@cpu, 0.7]")


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    with torch.library._scoped_library("recipe_test", "FRAGMENT") as library:
        yield library


@pytest.mark.usefixtures("mode")
def test_operators_inside_of_library_operators_are_seen(library: torch.library.Library) -> None:
    """vLLM hides attention in one, whose arguments do not show the step's shapes."""
    rows = [2]

    def attend(query: Tensor, out: Tensor) -> None:
        out[: rows[0]].copy_(query[: rows[0]].neg())

    library.define("attend(Tensor query, Tensor(a!) out) -> ()")
    library.impl("attend", attend, "CPU")
    query, out = x(), x()

    def region(count: int) -> None:
        rows[0] = count
        torch.ops.recipe_test.attend(query, out)

    assert different(lambda: region(2), lambda: region(2)) == 1
    assert different(lambda: region(2), lambda: region(3)) == 2
    assert torch.equal(out[:3], -query[:3])


@pytest.mark.usefixtures("mode")
def test_custom_operators_of_any_kind_still_work() -> None:
    @torch.library.custom_op("recipe_test::twice", mutates_args=())
    def twice(a: Tensor, factor: float) -> Tensor:
        return a * factor * 2

    a = x()
    results: list[Tensor] = []
    assert different(lambda: results.append(twice(a, 3.0)), lambda: twice(a, 3.0), lambda: twice(a, 4.0)) == 2
    torch.testing.assert_close(results[0], a * 6)


def test_warm_up_may_go_on_after_seal() -> None:
    recorder = RecipeRecorder("fail", device_type="cpu")
    recorder.seal()
    with recorder.warming():
        with recorder.warming(), recorder.recording("a"):
            x(3).neg()
        with recorder.recording("b"):
            x(4).neg()
    recorder.seal()
    with recorder.recording("serving"):
        x(3).neg()
    assert (recorder.total, recorder.new_recipes) == (2, 0)
    with pytest.raises(RecipeError), recorder.recording("serving"):
        x(5).neg()


def test_fail_names_the_label_the_operators_and_what_to_do() -> None:
    reports: list[NewRecipe] = []
    recorder = RecipeRecorder("fail", device_type="cpu", report=reports.append)
    with recorder.recording("forward"):
        x(4, 6).neg().abs()
    recorder.seal()
    with pytest.raises(RecipeError) as error, recorder.recording("sampling"):
        x(4, 6).neg().mul(0.25)
    message = str(error.value)
    for part in ("'sampling'", "aten.mul.Tensor[float32[4, 6]@cpu, 0.25]", "Warm up", "recipe_check"):
        assert part in message
    with pytest.raises(RecipeError, match="not in this order"), recorder.recording("forward"):
        abs(x(4, 6)).neg()
    assert recorder.new_recipes == len(reports) == 2
    assert recorder.last_new is reports[-1]


def test_count_reports_each_new_recipe_once() -> None:
    reports: list[NewRecipe] = []
    recorder = RecipeRecorder("count", device_type="cpu", report=reports.append)
    recorder.seal()
    for rows in (3, 4, 3, 4):
        with recorder.recording("forward"):
            torch.neg(x(rows))
    assert [report.label for report in reports] == ["forward"] * 2
    assert all(report.new_operator_count for report in reports)


def test_a_region_inside_of_another_cuts_it() -> None:
    a = x()
    recorder = RecipeRecorder("count", device_type="cpu")
    with recorder.recording("outer"):
        a.neg()
        with recorder.recording("inner"):
            a.abs()
        a.exp()
    assert recorder.total == 3
    for region in (a.neg, a.abs, a.exp):
        with recorder.recording("alone"):
            region()
    assert recorder.total == 3


def test_a_region_left_by_an_exception_is_forgotten() -> None:
    a = x()
    recorder = RecipeRecorder("fail", device_type="cpu")
    recorder.seal()
    with pytest.raises(RuntimeError, match="size"), recorder.recording("outer"):
        torch.add(a.neg(), x(5, 5))
    with pytest.raises(RuntimeError, match="size"), recorder.recording("outer"), recorder.recording("inner"):
        torch.add(a, x(5, 5))
    assert recorder.total == 0
    a.neg()
    with recorder.recording("empty"):
        pass
    assert recorder.total == 0
    with pytest.raises(RecipeError), recorder.recording("still works"):
        a.neg()


def test_an_outer_region_goes_on_after_an_inner_one_failed() -> None:
    a = x()
    recorder = RecipeRecorder("count", device_type="cpu")
    with recorder.recording("outer"):
        with pytest.raises(RuntimeError, match="size"), recorder.recording("inner"):
            torch.add(a.abs(), x(5, 5))
        a.exp()
    with recorder.recording("alone"):
        a.exp()
    assert recorder.total == 1


def test_threads_record_and_warm_up_independently() -> None:
    """Another thread warms up while this one is inside of a region and serves."""
    recorder = RecipeRecorder("count", device_type="cpu")
    recorder.seal()
    failures: list[BaseException] = []

    def warm_up() -> None:
        try:
            for rows in range(2, 30):
                with recorder.warming(), recorder.recording("warm-up"):
                    x(rows).neg().abs()
        except BaseException as failure:
            failures.append(failure)
            raise

    with recorder.recording("serving"):
        a = torch.neg(A)
        thread = threading.Thread(target=warm_up)
        thread.start()
        thread.join()
        torch.abs(a)
    assert not failures
    assert (recorder.total, recorder.new_recipes) == (29, 1)
    with recorder.recording("serving"):
        torch.abs(torch.neg(A))
    assert recorder.new_recipes == 1


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound a recipe counts every time; what was remembered stays known."""
    monkeypatch.setattr(recorder_module, "_REMEMBERED", 2)
    recorder = RecipeRecorder("count", device_type="cpu")
    recorder.seal()
    for rows in (1, 2, 3, 3, 1, 2):
        with recorder.recording("forward"):
            torch.neg(x(rows, 1))
    assert recorder.new_recipes == 4


def test_an_unknown_check_is_refused() -> None:
    check: Any = "off"
    with pytest.raises(ValueError, match="recipe_check is 'off', expected one of count, fail"):
        RecipeRecorder(check, device_type="cpu")
