"""The registry: our methods, third parties' methods, and what is refused."""

from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.sparse.third_party import Newest, NewestOptions
from vllm_gaudi_ucm import registry as registry_module
from vllm_gaudi_ucm.cli.doctor.configuration import sparse_checks
from vllm_gaudi_ucm.config.ucm_config import describe, resolve_config
from vllm_gaudi_ucm.options.errors import UcmConfigError
from vllm_gaudi_ucm.sparse.base import UcmSparseRole
from vllm_gaudi_ucm.sparse.block_sparse import BlockSparse
from vllm_gaudi_ucm.sparse.factory import UcmSparseFactory
from vllm_gaudi_ucm.sparse.methods.gsa import ESA, GSA, GsaOptions
from vllm_gaudi_ucm.sparse.methods.kvstar import KVStar
from vllm_gaudi_ucm.sparse.registry import ENTRY_POINTS, SPARSE_METHODS, SparseMethodError

HERE = "tests.sparse.third_party"
WORKER, SCHEDULER = UcmSparseRole.WORKER, UcmSparseRole.SCHEDULER


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    """What a test registers ends with it."""
    with SPARSE_METHODS.scope():
        yield


def test_our_methods() -> None:
    assert SPARSE_METHODS.names() == ["GSA", "ESA", "KVStar"]
    for name, wanted in (("GSA", GSA), ("ESA", ESA), ("KVStar", KVStar)):
        assert type(UcmSparseFactory.create_sparse_method(name, WORKER)) is wanted


def test_usage_example_of_the_gsa_seed() -> None:
    """Seed 000, 9, as written, import paths aside."""
    kv_caches: dict[str, torch.Tensor] = {}
    layer_idx, metadata = 0, None
    query, key, value = torch.ones(1, 2, 4), torch.ones(1, 1, 4), torch.ones(1, 1, 4)
    gsa: Any = UcmSparseFactory.create_sparse_method(
        "GSA", UcmSparseRole.WORKER, {"sparse_ratio": 0.3, "prefetch_workers": 4}
    )
    gsa.register_kv_caches(kv_caches)
    q, k, v, output = gsa.attention_begin(layer_idx, query, key, value, metadata)
    output = gsa.attention_finished(layer_idx, output)
    assert (q is query, k is key, v is value, output) == (True, True, True, None)


@pytest.mark.parametrize(
    "config",
    [
        {"sparse_ratio": 0.5},
        GsaOptions(sparse_ratio=0.5),
        {"ucm_sparse_config": {"GSA": {"sparse_ratio": 0.5}}},
        {"ucm_sparse_method": "GSA", "ucm_sparse_config": {"GSA": {"sparse_ratio": 0.5}}},
        resolve_config({"ucm": {"ucm_sparse_config": {"GSA": {"sparse_ratio": 0.5}}}}),
    ],
)
def test_every_form_of_a_configuration(config: Any) -> None:
    assert UcmSparseFactory.create_sparse_method("GSA", SCHEDULER, config).options == GsaOptions(sparse_ratio=0.5)


@pytest.mark.parametrize("config", [None, {}, {"ucm_sparse_method": "GSA"}])
def test_defaults(config: Any) -> None:
    assert UcmSparseFactory.create_sparse_method("GSA", SCHEDULER, config).options == GsaOptions()


def test_unknown_options_are_refused() -> None:
    """covers: C4"""
    with pytest.raises(UcmConfigError, match=r"GSA\.sparse_rato: found an unknown key, expected GSA\.sparse_ratio"):
        UcmSparseFactory.create_sparse_method("GSA", SCHEDULER, {"sparse_rato": 0.5})
    with pytest.raises(UcmConfigError, match=r"GSA\.prefetch_workers: found 0, expected integer, 1 to 64"):
        UcmSparseFactory.create_sparse_method("GSA", SCHEDULER, {"prefetch_workers": 0})
    with pytest.raises(UcmConfigError, match="found 3, expected mapping with the keys sparse_ratio"):
        UcmSparseFactory.create_sparse_method("GSA", SCHEDULER, 3)  # type: ignore[arg-type]


def test_unknown_method_names_the_known_and_the_nearest() -> None:
    with pytest.raises(
        SparseMethodError, match="found 'KVSta', expected one of GSA, ESA, KVStar; the nearest is KVStar"
    ):
        UcmSparseFactory.create_sparse_method("KVSta", SCHEDULER)


def test_method_of_a_third_party() -> None:
    """Registered at run time; its options are checked, and its scores are its own."""
    UcmSparseFactory.register_sparse_method("Newest", HERE, "Newest")
    UcmSparseFactory.register_sparse_method("Newest", HERE, "Newest")  # twice the same is no conflict
    config = resolve_config(
        {"ucm": {"ucm_sparse_method": "Newest", "ucm_sparse_config": {"Newest": {"weight": 2.0, "min_blocks": 9}}}}
    )
    method = UcmSparseFactory.create_sparse_method("Newest", WORKER, config)
    assert isinstance(method, BlockSparse)
    assert type(method).__qualname__ == Newest.__qualname__
    assert method.options.model_dump() == NewestOptions(weight=2.0, min_blocks=9).model_dump()
    candidates: Any = SimpleNamespace(blocks=torch.tensor([5, 6, 7]))
    scores = method.block_scores(0, torch.zeros(1, 2, 4), candidates)
    assert scores is not None
    assert scores.tolist() == [1, 2, 3]
    assert GSA(WORKER).block_scores(0, torch.zeros(1, 2, 4), candidates) is None


def test_method_of_an_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Named by an entry point: every process knows it, and none imports it before it is used."""
    point = EntryPoint("Newest", f"{HERE}:Newest", ENTRY_POINTS)
    monkeypatch.setattr(
        registry_module, "_installed", lambda group, path: EntryPoints([point] if group == ENTRY_POINTS else [])
    )
    assert SPARSE_METHODS.names() == ["GSA", "ESA", "KVStar", "Newest"]
    method = UcmSparseFactory.create_sparse_method("KVStar", SCHEDULER, {"base_method": "Newest", "weight": 3.0})
    assert method.selecting_method.options.model_dump()["weight"] == 3.0


@pytest.mark.parametrize(
    ("module", "name", "message"),
    [
        ("no.such.module", "Method", r"no\.such\.module\.Method cannot be loaded"),
        (HERE, "Nothing", "Nothing cannot be loaded"),
        (HERE, "NoMethod", "expected a subclass of UcmSparseBase"),
    ],
)
def test_method_that_cannot_be_used(module: str, name: str, message: str) -> None:
    """Registering imports nothing; using it says what is wrong, in the configuration, too."""
    UcmSparseFactory.register_sparse_method("Theirs", module, name)
    with pytest.raises(SparseMethodError, match=message):
        UcmSparseFactory.create_sparse_method("Theirs", SCHEDULER)
    with pytest.raises(UcmConfigError, match=rf"ucm\.ucm_sparse_method: found 'Theirs'.*{message}"):
        resolve_config({"ucm": {"ucm_sparse_method": "Theirs"}})
    with pytest.raises(UcmConfigError, match=rf"ucm\.ucm_sparse_config\.Theirs: .*{message}"):
        resolve_config({"ucm": {"ucm_sparse_config": {"Theirs": {}}}})
    with pytest.raises(UcmConfigError, match=rf"KVStar\.base_method: found 'Theirs'.*{message}"):
        resolve_config({"ucm": {"ucm_sparse_config": {"KVStar": {"base_method": "Theirs"}}}})


def test_name_that_is_taken() -> None:
    with pytest.raises(SparseMethodError, match=r"'GSA': found .*gsa\.GSA registered already, expected a name that is"):
        UcmSparseFactory.register_sparse_method("GSA", HERE, "Newest")


def test_a_method_of_one_file_is_known_everywhere() -> None:
    """Its section, its row of the doctor and its rows of the configuration's reference come from the registry."""
    key = "ucm.ucm_sparse_config.Newest"
    assert not [row for row in describe() if row.key.startswith(key)]
    UcmSparseFactory.register_sparse_method("Newest", HERE, "Newest")
    rows = {row.key: row for row in describe()}
    assert rows[f"{key}.weight"][1:] == ("number", "1.0", "Of the newest block.")
    assert f"{key}.sparse_ratio" in rows
    section = {"ucm_sparse_config": {"Newest": {"weight": 2.0}}}
    with pytest.raises(UcmConfigError, match=r"Newest\.wieght: found an unknown key, expected .*Newest\.weight"):
        resolve_config({"ucm": {"ucm_sparse_config": {"Newest": {"wieght": 2.0}}}})
    on = {
        check.name: check
        for check in sparse_checks(resolve_config({"ucm": {"ucm_sparse_method": "Newest", **section}}))
    }
    assert "weight=2.0" in on["Newest"].found
    off = {check.name: check for check in sparse_checks(resolve_config({"ucm": section}))}
    assert off[key].status == "warn"
