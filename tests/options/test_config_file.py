"""Configuration files: YAML and JSON, with and without the key `ucm`, and every way a file can be wrong."""

from pathlib import Path

import pytest

from vllm_gaudi_ucm.config.ucm_config import UcmConfig, resolve_config, resolve_value
from vllm_gaudi_ucm.options.errors import UcmConfigError
from vllm_gaudi_ucm.store.factory import resolve_store_options


def write(folder: Path, name: str, text: str) -> str:
    """Writes a file and returns its path as vLLM's JSON option would carry it."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("plain.yaml", "cpu:\n  threads: 2\nattention:\n  contiguous_pa: off\n"),
        ("under_key.yml", "ucm:\n  cpu: {threads: 2}\n  attention: {contiguous_pa: false}\n"),
        ("plain.json", '{"cpu": {"threads": 2}, "attention": {"contiguous_pa": false}}'),
        ("under_key.json", '{"ucm": {"cpu": {"threads": 2}, "attention": {"contiguous_pa": false}}}'),
    ],
)
def test_file(tmp_path: Path, name: str, text: str) -> None:
    config = resolve_config({"ucm": write(tmp_path, name, text)})
    assert config.cpu.threads == 2
    assert config.attention.contiguous_pa is False


@pytest.mark.parametrize("text", ["", "# only a comment\n", "ucm:\n"])
def test_empty_file_means_defaults(tmp_path: Path, text: str) -> None:
    assert resolve_config({"ucm": write(tmp_path, "empty.yaml", text)}) == UcmConfig()


def test_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path, "ucm.yaml", "cpu: {threads: 7}")
    assert resolve_config({"ucm": "~/ucm.yaml"}).cpu.threads == 7


def message_of(path: str) -> str:
    """The message that a file's problems raise."""
    with pytest.raises(UcmConfigError) as caught:
        resolve_config({"ucm": path})
    return str(caught.value)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    missing = message_of(str(tmp_path / "none.yaml"))
    assert f"ucm: found file '{tmp_path}/none.yaml' that cannot be read (No such file or directory)" in missing
    assert "that cannot be read (Is a directory)" in message_of(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "text", "place"),
    [
        ("bad.yaml", "cpu:\n  threads: 2\n attention: 3\n", "line 3"),
        ("tab.yaml", "cpu:\n\tthreads: 2\n", "line 2, column 1"),
        ("twice.yaml", "cpu: {threads: 2}\nattention: {}\ncpu: {}\n", "line 3, column 1: key 'cpu' is given twice"),
        ("bad.json", '{\n "cpu": {\n}', "line 3, column 2"),
    ],
)
def test_malformed_file_names_the_place(tmp_path: Path, name: str, text: str, place: str) -> None:
    message = message_of(write(tmp_path, name, text))
    assert "malformed file" in message
    assert name in message
    assert place in message


def test_yaml_tags_run_nothing(tmp_path: Path) -> None:
    """covers: D6. A tag that plain YAML would execute is a malformed file."""
    mark = tmp_path / "ran"
    text = f"cpu: !!python/object/apply:os.mkdir ['{mark}']\n"
    assert "could not determine a constructor" in message_of(write(tmp_path, "evil.yaml", text))
    assert not mark.exists()


def test_problems_name_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "ucm.yaml", "ucm:\n  cpu: {threads: 0}\n")
    assert f"(file {path}): ucm.cpu.threads: found 0" in message_of(path)


def test_file_that_is_a_list_or_not_text(tmp_path: Path) -> None:
    assert "ucm: found [1], expected a mapping" in message_of(write(tmp_path, "list.yaml", "- 1\n"))
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x80")
    assert "not UTF-8 text" in message_of(str(tmp_path / "binary.yaml"))


@pytest.mark.parametrize(
    "text",
    [
        "graphs: {mode: off, recipe_check: off}\nattention: {contiguous_pa: off}\n",
        "graphs: {mode: no, recipe_check: false}\nattention: {contiguous_pa: false}\n",
        'graphs: {mode: "off", recipe_check: "off"}\nattention: {contiguous_pa: false}\n',
    ],
)
def test_off_is_a_choice_quoted_or_not(tmp_path: Path, text: str) -> None:
    """YAML 1.1 reads a bare off as false."""
    config = resolve_config({"ucm": write(tmp_path, "ucm.yaml", text)})
    assert (config.graphs.mode, config.graphs.recipe_check) == ("off", "off")
    assert config.attention.contiguous_pa is False


def test_true_is_no_choice_without_on(tmp_path: Path) -> None:
    message = message_of(write(tmp_path, "ucm.yaml", "graphs: {mode: on}"))
    assert 'ucm.graphs.mode: found True, expected one of "auto", "off"' in message


@pytest.mark.parametrize(
    "text",
    [
        "graphs:\nattention:\ncpu:\nucm_sparse_config:\nmemory_mode:\n",
        "ucm_sparse_config:\n  GSA:\n  KVStar:\n",
        '{"graphs": null, "memory_mode": null}',
    ],
)
def test_an_empty_section_is_an_empty_section(tmp_path: Path, text: str) -> None:
    name = "ucm.json" if text.startswith("{") else "ucm.yaml"
    assert resolve_config({"ucm": write(tmp_path, name, text)}) == UcmConfig()
    assert resolve_config({"ucm": None}) == UcmConfig()


def test_an_empty_section_of_a_store() -> None:
    options = resolve_store_options({"kind": "file", "path": "/x", "breaker": None})
    assert options == resolve_store_options({"kind": "file", "path": "/x"})


def test_null_where_a_value_belongs_is_a_problem(tmp_path: Path) -> None:
    message = message_of(write(tmp_path, "ucm.yaml", "graphs: {mode: , max_graphs: }"))
    assert "ucm.graphs.mode: found None" in message
    assert "ucm.graphs.max_graphs: found None" in message


@pytest.mark.parametrize("number", [".inf", "-.inf", ".nan"])
def test_numbers_are_finite(tmp_path: Path, number: str) -> None:
    text = f"graphs: {{memory_budget: {number}}}\nmemory_mode: {{offloaded_ratio: {number}}}\n"
    message = message_of(write(tmp_path, "ucm.yaml", text))
    assert f"ucm.graphs.memory_budget: found {float(number.replace('.', ''))}, expected number, above 0" in message
    assert "ucm.memory_mode.offloaded_ratio: found" in message


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n}\n  <<: [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("deep.json", "[" * 100_000, "nested too deeply"),
        ("deep_objects.json", '{"a":' * 100_000 + "1" + "}" * 100_000, "nested too deeply"),
        ("deep.yaml", "[" * 20_000, "nested too deeply"),
        ("digits.json", '{"cpu": {"threads": ' + "9" * 5000 + "}}", "5000 digits"),
        ("digits.yaml", "cpu: {threads: " + "9" * 5000 + "}", "5000 digits"),
        ("bomb.yaml", BOMB, "more than 100,000 values"),
        ("merges.yaml", MERGES, "more than 100,000 values"),
        ("self.yaml", "graphs: &a {mode: *a}", "an alias inside of its own anchor"),
        ("large.yaml", "# " + "x" * (1 << 20), "more than 1 MiB"),
        ("large.json", '"' + "x" * (1 << 20) + '"', "more than 1 MiB"),
    ],
)
def test_deep_and_huge_files(tmp_path: Path, name: str, text: str, what: str) -> None:
    message = message_of(write(tmp_path, name, text))
    assert f"ucm: found malformed file '{tmp_path}/{name}'" in message
    assert what in message
    assert len(message) < 1000


def test_anchors_are_no_bombs(tmp_path: Path) -> None:
    text = "ucm_sparse_config:\n  GSA: &all {sparse_ratio: 0.2}\n  ESA: *all\n"
    config = resolve_config({"ucm": write(tmp_path, "ucm.yaml", text)})
    assert config.ucm_sparse_config.ESA.sparse_ratio == 0.2


def test_a_long_value_is_shown_in_part(tmp_path: Path) -> None:
    message = message_of(write(tmp_path, "ucm.yaml", f"cpu: {{threads: {['word'] * 5000}}}"))
    assert "ucm.cpu.threads: found ['word', 'word'," in message
    assert len(message) < 1000


def test_a_cut_parts_no_password() -> None:
    """What is shown of a long value is cut, and a password's end may lie behind the cut."""
    from vllm_gaudi_ucm.options.errors import shown

    text = shown("redis://user:" + "secret" * 100 + "@host/0")
    assert "secret" not in text


@pytest.mark.parametrize("name", ["2026-01-02", "2026-13-45"])
def test_a_path_may_look_like_a_date(tmp_path: Path, name: str) -> None:
    """Other packages of the process change what plain YAML makes of dates; here they are text."""
    assert resolve_value(write(tmp_path, "date.yaml", f"phase_log: {name}")).phase_log == Path(name)
