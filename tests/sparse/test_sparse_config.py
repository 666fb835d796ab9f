"""The sections of `ucm_sparse_config`: inline and from files, ours and third parties', alone and together."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_gaudi_ucm.config.ucm_config import UcmConfig, resolve_config, resolve_value
from vllm_gaudi_ucm.options.errors import UcmConfigError
from vllm_gaudi_ucm.sparse.factory import UcmSparseFactory
from vllm_gaudi_ucm.sparse.methods.gsa import GsaOptions
from vllm_gaudi_ucm.sparse.methods.kvstar import KVStarOptions
from vllm_gaudi_ucm.sparse.registry import SPARSE_METHODS
from vllm_gaudi_ucm.sparse.sections import SparseConfig

SEED_GSA = """
ucm_sparse_config:
  GSA:
    sparse_ratio: 0.3
    local_window_sz: 2
    init_window_sz: 1
    min_blocks: 4
    prefetch_workers: 4
    max_pending_prefetch: 64
    prefetch_ahead: 2
    prefetch_cache_size: 1000
"""
SEED_KVSTAR = """
ucm_sparse_config:
  KVStar:
    checkpoint_interval: 8
    lock_duration: 16
    update_threshold: 2
    base_method: "GSA"
    sparse_ratio: 0.3
"""


@pytest.fixture(autouse=True)
def third_party() -> Iterator[None]:
    with SPARSE_METHODS.scope():
        UcmSparseFactory.register_sparse_method("Newest", "tests.sparse.third_party", "Newest")
        yield


def sparse(method: str | None = None, **sections: Any) -> UcmConfig:
    return resolve_value({"ucm_sparse_method": method, "ucm_sparse_config": sections})


def problems(method: str | None = None, **sections: Any) -> list[str]:
    with pytest.raises(UcmConfigError) as caught:
        sparse(method, **sections)
    return [str(problem).removeprefix("ucm.ucm_sparse_config.") for problem in caught.value.problems]


@pytest.mark.parametrize("text", [SEED_GSA, SEED_KVSTAR])
@pytest.mark.parametrize("whole", [True, False])
def test_examples_of_the_seeds(tmp_path: Path, text: str, whole: bool) -> None:
    """As files for `ucm` itself, and as files for `ucm_sparse_config`."""
    path = tmp_path / "sparse.yaml"
    path.write_text(text)
    config = resolve_config({"ucm": str(path) if whole else {"ucm_sparse_config": str(path)}})
    assert config.ucm_sparse_config.options("GSA") == GsaOptions()
    assert config.ucm_sparse_config.KVStar.checkpoint_interval == 8


def test_problems_of_a_file_name_the_key(tmp_path: Path) -> None:
    missing = {"ucm": {"ucm_sparse_config": str(tmp_path / "none.yaml")}}
    with pytest.raises(UcmConfigError, match=r"ucm\.ucm_sparse_config: found file .* that cannot be read"):
        resolve_config(missing)
    (tmp_path / "bad.yaml").write_text("GSA: [")
    with pytest.raises(UcmConfigError, match=r"ucm\.ucm_sparse_config: found malformed file"):
        resolve_config({"ucm": {"ucm_sparse_config": str(tmp_path / "bad.yaml")}})
    (tmp_path / "wrong.yaml").write_text("GSA: {sparse_ratio: 2}")
    with pytest.raises(UcmConfigError, match=r"ucm\.ucm_sparse_config\.GSA\.sparse_ratio: found 2"):
        resolve_config({"ucm": {"ucm_sparse_config": str(tmp_path / "wrong.yaml")}})


@pytest.mark.parametrize("value", [3, False, ["GSA"]])
def test_sections_that_are_no_mapping(value: Any) -> None:
    with pytest.raises(UcmConfigError) as caught:
        resolve_value({"ucm_sparse_config": value})
    wanted = "a mapping by sparse method, or the path of a YAML or JSON file"
    assert [str(p) for p in caught.value.problems] == [f"ucm.ucm_sparse_config: found {value!r}, expected {wanted}"]


def test_unknown_method() -> None:
    with pytest.raises(UcmConfigError, match=r"method: found 'gsa', expected GSA \(the nearest known method"):
        sparse("gsa")
    assert problems(gsa={}) == ["gsa: found an unknown key, expected ucm.ucm_sparse_config.GSA (the nearest valid key)"]
    assert problems(Other={"a": 1})[0].startswith("Other: found an unknown key, expected")


def test_every_problem_of_every_section() -> None:
    """covers: C19. Nested keys are checked, too."""
    nearest = "(the nearest valid key)"
    prefix = "ucm.ucm_sparse_config"
    assert problems(
        GSA={"sparse_rato": 1.0, "min_blocks": 0},
        ESA={"reuse_layers": 2},
        KVStar={"lock_duration": 0, "min_bloks": 3},
        Newest={"weight": "2"},
    ) == [
        "GSA.min_blocks: found 0, expected integer, at least 1",
        f"GSA.sparse_rato: found an unknown key, expected {prefix}.GSA.sparse_ratio {nearest}",
        "ESA.reuse_layers: found an unknown key, expected "
        + " or ".join(
            f"{prefix}.ESA.{name}"
            for name in (
                "implementation",
                "init_window_sz",
                "local_window_sz",
                "min_blocks",
                "min_tokens",
                "prompt_ratio",
                "prompt_tile",
                "scores_over_ranks",
                "sparse_ratio",
                "sparse_steps",
                "summary",
                "summary_dtype",
            )
        ),
        "KVStar.lock_duration: found 0, expected integer, at least 1",
        f"KVStar.min_bloks: found an unknown key, expected {prefix}.KVStar.min_blocks {nearest}",
        "Newest.weight: found '2', expected number",
    ]


@pytest.mark.parametrize("base", ["KVStar", "Gsa", 3])
def test_base_method_of_kvstar(base: Any) -> None:
    """covers: C19. KVStar over KVStar would never end."""
    found = problems(KVStar={"base_method": base, "anything": 3})
    assert len(found) == 1
    assert found[0].startswith(f"KVStar.base_method: found {base!r}, expected ")


def test_options_of_kvstars_base() -> None:
    """Beside KVStar's own they come before those in the base method's section."""
    config = sparse(
        "KVStar", KVStar={"sparse_ratio": 0.5, "dense_layers": [0]}, GSA={"sparse_ratio": 0.1, "min_blocks": 9}
    )
    options = config.ucm_sparse_config.options("KVStar")
    assert isinstance(options, KVStarOptions)
    assert options.base_options() == GsaOptions(sparse_ratio=0.5, min_blocks=9, dense_layers=(0,))
    assert config.ucm_sparse_config.options("GSA") == GsaOptions(sparse_ratio=0.1, min_blocks=9)
    other = sparse(KVStar={"base_method": "Newest", "weight": 4.0}).ucm_sparse_config.options("KVStar")
    assert isinstance(other, KVStarOptions)
    assert other.base_options().model_dump()["weight"] == 4.0


@pytest.mark.parametrize("summary", ["hash", "codes"])
def test_codes_have_no_dtype_to_choose(summary: str) -> None:
    """Also where one of the two options stands in the base method's section."""
    wanted = f"'fp8', expected auto with `summary: {summary}`, whose codes are bytes; or another summary"
    asked = {"summary": summary, "summary_dtype": "fp8"}
    assert problems(GSA=asked, ESA=asked, KVStar=asked) == [
        f"{name}.summary_dtype: found {wanted}" for name in ("GSA", "ESA", "KVStar")
    ]
    with pytest.raises(UcmConfigError, match=r"KVStar\.summary_dtype: found 'fp8', expected auto with"):
        sparse("KVStar", GSA={"summary": summary}, KVStar={"summary_dtype": "fp8"})
    sparse("KVStar", GSA={"summary": summary}, KVStar={"summary": "minmax", "summary_dtype": "fp8"})


def test_steps_of_a_selection_are_decided_once() -> None:
    """KVStar's lock and GSA's reuse_steps would contradict each other; without KVStar the section is fine."""
    message = "KVStar.reuse_steps: found 4, expected 1, because KVStar's lock decides how long a selection serves"
    assert problems("KVStar", GSA={"reuse_steps": 4}) == [message]
    assert problems(KVStar={"reuse_steps": 4}) == [message]
    assert sparse("GSA", GSA={"reuse_steps": 4}).ucm_sparse_config.GSA.reuse_steps == 4


def test_round_trip_hash_and_equality() -> None:
    """Third parties' sections and KVStar's base options included."""
    sections = {
        "GSA": {"dense_layers": [0, 3]},
        "KVStar": {"sparse_ratio": 0.5, "dense_layers": [1]},
        "Newest": {"weight": 2.0},
    }
    config = sparse("KVStar", **sections)
    twin = resolve_value(json.loads(json.dumps(config.to_dict())))
    assert twin == config
    assert hash(twin) == hash(config)
    for name in sections:
        other = sparse("KVStar", **{key: value for key, value in sections.items() if key != name})
        assert other != config
        assert hash(other) != hash(config)
    assert len({config, twin, UcmConfig()}) == 2


def test_immutable() -> None:
    config = sparse(KVStar={"dense_layers": [1]}, Newest={})
    for section in (config.ucm_sparse_config, *(section for _, section in config.ucm_sparse_config)):
        with pytest.raises(ValueError, match="frozen"):
            section.min_blocks = 3
    assert config.ucm_sparse_config.KVStar.given_base_options() == {"dense_layers": (1,)}


def test_resolved_sections_are_taken_as_they_are() -> None:
    config = SparseConfig(GSA=GsaOptions(min_blocks=7))
    assert UcmConfig(ucm_sparse_config=config).ucm_sparse_config is config
