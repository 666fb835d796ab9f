"""Memory mode in the engine: blocks leave and come back while requests decode."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.engine import pair_connector
from tests.engine.memory_mode import check_finite, copies_of, generated, ucm
from tests.engine.offloaded_blocks import WatchedEngine
from tests.engine.serving import Engine, greedy_params
from tests.engine.sparse import COMMON, OPTIONS, tokens
from vllm_gaudi_ucm.options.errors import UnsupportedFeatureError

pytestmark = pytest.mark.slow  # starts engines

PROMPTS = [tokens(count) for count in (20, 130, 200, 260)] + [COMMON + tokens(60), COMMON + tokens(61)]


@pytest.mark.parametrize("static", [False, True], ids=["true shapes", "static"])
@pytest.mark.parametrize("caching", [False, True], ids=["store", "prefix cache"])
def test_blocks_leave_and_come_back(tiny_llama: Path, static: bool, caching: bool) -> None:
    """covers: C8 C10. In chunks, with shared prefixes; nothing that is away is read, and what returns is what left."""
    with Engine(tiny_llama, ucm(static=static), **OPTIONS, enable_prefix_caching=caching) as engine:
        watched = WatchedEngine(engine)
        outputs = watched.generate(PROMPTS, 40)
        check_finite(outputs)
        totals = watched.offload.totals
        assert totals.released
        assert totals.found if caching else totals.loaded
        assert not totals.failed
        assert [len(found) for found in generated(outputs)] == [40] * len(PROMPTS)
        engine.check_idle()


def test_without_host_memory_blocks_stay(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """covers: F7 C8. A copy that cannot be made is counted, and the step goes on."""

    def nothing_left(nbytes: int) -> memoryview:
        raise MemoryError(f"{nbytes} bytes")

    with Engine(tiny_llama, ucm(), **OPTIONS) as engine:
        watched = WatchedEngine(engine)
        assert engine.runner.parts.sparse is not None
        with monkeypatch.context() as patched:
            patched.setattr(engine.runner.parts.sparse.offload._blocks, "allocate", nothing_left)
            check_finite(watched.generate([PROMPTS[2]], 10))
        totals = watched.offload.totals
        assert totals.unsaved
        assert not totals.released
        check_finite(watched.generate([PROMPTS[2]], 10))
        assert totals.released
        engine.check_idle()


@pytest.mark.parametrize("method", ["ESA", "KVStar"])
def test_other_methods(tiny_llama: Path, method: str) -> None:
    """A locked selection is made anew when its blocks leave."""
    with Engine(tiny_llama, ucm(method), **OPTIONS, enable_prefix_caching=False) as engine:
        watched = WatchedEngine(engine)
        check_finite(watched.generate(PROMPTS, 40))
        assert watched.offload.totals.released
        assert watched.offload.totals.loaded


def test_drafts(tiny_llama: Path) -> None:
    """covers: C16. Verified rows see what a single row sees."""
    speculative = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    repeated = [(prompt[:40] * 6)[:200] for prompt in PROMPTS[2:4]]
    options = {**OPTIONS, "enable_prefix_caching": False}
    with Engine(tiny_llama, ucm("KVStar"), **options, speculative_config=speculative) as engine:
        watched = WatchedEngine(engine)
        check_finite(watched.generate(repeated, 60))
        assert watched.offload.totals.released
        assert watched.offload.totals.loaded
        engine.check_idle()


def test_copies_in_files(tmp_path: Path, tiny_llama: Path) -> None:
    """Nothing of them is left when the engine has ended."""
    config = ucm(store={"kind": "file", "path": str(tmp_path / "kv"), "fsync": False})
    with Engine(tiny_llama, config, **OPTIONS, enable_prefix_caching=False) as engine:
        watched = WatchedEngine(engine)
        check_finite(watched.generate(PROMPTS[2:4], 60))
        assert watched.offload.totals.loaded
        store = copies_of(engine).store
        assert store.stats().saves >= watched.offload.totals.saved > 0
    assert store.stats().blocks == 0


def test_blocks_that_wait_to_come_back_are_read_before_their_turn(tmp_path: Path, tiny_llama: Path) -> None:
    """covers: C4. GSA's prefetch options: two blocks come back in a step, and the next ones are in host memory then."""
    config = ucm(moves_per_step=2, store={"kind": "file", "path": str(tmp_path / "kv"), "fsync": False})
    config["ucm_sparse_config"]["GSA"].update(prefetch_workers=2, prefetch_ahead=4)
    with Engine(tiny_llama, config, **OPTIONS, enable_prefix_caching=False) as engine:
        watched = WatchedEngine(engine)
        check_finite(watched.generate(PROMPTS[2:], 60))
        assert watched.offload.totals.loaded
        stats = copies_of(engine)._engine.stats()
        assert stats.threads == 2
        assert stats.blocks_cached + stats.blocks_shared
        assert stats.blocks_loaded < 2 * watched.offload.totals.loaded, "no block is read twice"


def test_room_for_everything_changes_no_token(tiny_llama: Path) -> None:
    """Resident ratio 1: the method chooses as it does without memory mode."""
    plain = ucm()
    del plain["memory_mode"]
    with Engine(tiny_llama, plain, **OPTIONS) as engine:
        expected = generated(engine.generate(PROMPTS, greedy_params(30)))
    with Engine(tiny_llama, ucm(on_device_ratio=1.0), **OPTIONS) as engine:
        watched = WatchedEngine(engine)
        assert generated(watched.generate(PROMPTS, 30)) == expected
        assert not watched.offload.totals.released


def test_a_full_store_changes_no_token(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """covers: C8. What cannot be copied does not leave."""
    plain = ucm()
    del plain["memory_mode"]
    with Engine(tiny_llama, plain, **OPTIONS) as engine:
        expected = generated(engine.generate(PROMPTS, greedy_params(30)))
    with Engine(tiny_llama, ucm(), **OPTIONS) as engine:
        copies = copies_of(engine)
        monkeypatch.setattr(copies.store, "save", lambda key, block: False)
        watched = WatchedEngine(engine)
        assert generated(watched.generate(PROMPTS, 30)) == expected
        assert watched.offload.totals.unsaved
        assert not watched.offload.totals.released


def test_a_store_that_loses_everything(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """covers: C8 D5. What left stays away, is counted, and is never attended."""
    with Engine(tiny_llama, ucm(), **OPTIONS, enable_prefix_caching=False) as engine:
        store = copies_of(engine).store
        monkeypatch.setattr(store, "lend", lambda key: None)
        monkeypatch.setattr(store, "load", lambda key, into: False)
        watched = WatchedEngine(engine)
        check_finite(watched.generate(PROMPTS, 40))
        totals = watched.offload.totals
        assert totals.failed
        assert not totals.loaded
        engine.check_idle()


@pytest.mark.usefixtures("contract")
@pytest.mark.parametrize("static", [False, True], ids=["true shapes", "static"])
def test_preempted_requests_compute_everything_again(tiny_llama: Path, static: bool) -> None:
    """covers: C5 C9. A cache so small that requests lose their blocks, some of which are away."""
    growing = [tokens(80 + 3 * count) for count in range(6)]
    with Engine(tiny_llama, ucm(static=static), **OPTIONS, num_gpu_blocks_override=30) as engine:
        watched = WatchedEngine(engine)
        check_finite(watched.generate(growing, 60))
        assert engine.preemptions
        assert watched.offload.totals.released
        engine.check_idle()


def test_aborted_requests_leave_nothing(tiny_llama: Path) -> None:
    """covers: C5 C9. Aborted in any state; blocks of a later request of the same id are its own."""
    rng = random.Random(5)
    with Engine(tiny_llama, ucm(), **OPTIONS, enable_prefix_caching=False) as engine:
        watched = WatchedEngine(engine)
        for _ in range(6):
            engine.add("again", rng.choice(PROMPTS[2:]), greedy_params(60))
            for _ in range(rng.randint(3, 25)):
                watched.step()
            engine.llm.llm_engine.abort_request(["again"])
        engine.add("again", PROMPTS[3], greedy_params(30))
        check_finite(watched.finish(["again"]))
        engine.check_idle()
        # the end of a request is told with the next step
        engine.generate([PROMPTS[0]], greedy_params(1))
        copies_of(engine).check_idle()


def test_more_requests_run_at_once(tiny_llama: Path) -> None:
    """The same memory and the same traffic, with memory mode on and off."""
    prompts, most = [tokens(190) for _ in range(6)], []
    plain = ucm()
    del plain["memory_mode"]
    for config in (plain, ucm(moves_per_step=32)):
        with Engine(tiny_llama, config, **OPTIONS, num_gpu_blocks_override=42) as engine:
            for prompt in prompts:
                engine.add(engine.new_id(), prompt, greedy_params(100))
            running = []
            while engine._core.scheduler.has_unfinished_requests():
                engine.step()
                running.append(len(engine._core.scheduler.running))
            most.append(sum(running) / len(running))
    assert most[1] > 1.4 * most[0]


def test_what_does_not_know_of_blocks_that_are_away_is_refused(tiny_llama: Path) -> None:
    module = pair_connector.__name__
    pairs = {"kv_connector": "PairConnector", "kv_connector_module_path": module, "kv_role": "kv_both"}
    others: list[tuple[str, dict[str, Any]]] = [
        ("PairConnector", {"kv_transfer_config": pairs}),
        ("OffloadingConnector", {"kv_offloading_size": 1.0}),
    ]
    for name, options in others:
        with pytest.raises(UnsupportedFeatureError, match=rf"the KV connector {name} with ucm\.memory_mode"):
            Engine(tiny_llama, ucm(), **OPTIONS, **options)
    drafts = {"method": "draft_model", "model": str(tiny_llama), "num_speculative_tokens": 2}
    with pytest.raises(UnsupportedFeatureError, match=r"a draft model with ucm\.memory_mode"):
        Engine(tiny_llama, ucm(), **OPTIONS, speculative_config=drafts)


def test_copies_in_the_folder_of_a_connector_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    """Either would delete what is the other's to make room."""
    store = {"kind": "file", "path": str(tmp_path / "kv")}
    connector = {
        "kv_connector": "UcmConnector",
        "kv_connector_module_path": "vllm_gaudi_ucm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"store": {**store, "path": f"{tmp_path}/x/../kv"}},
    }
    with pytest.raises(Exception, match=r"memory_mode\.store\.path.*another folder than that of"):
        Engine(tiny_llama, ucm(store=store), **OPTIONS, kv_transfer_config=connector)
