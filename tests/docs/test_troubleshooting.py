"""The troubleshooting page quotes messages that the code has, so that a search for a message finds the page."""

from __future__ import annotations

import re

import pytest

from tests.docs.commands import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
# what other programs say: Python, and the kernel
FOREIGN = {"No module named 'vllm._C", "No space left on device"}


def quoted() -> list[str]:
    """Messages of the first column: the parts of them that do not depend on the case, of three words and more."""
    cells = re.findall(r"^\| (?!you see|---)(.*?) \|", PAGE, re.M)
    parts = (
        part.strip(" '") for cell in cells for quote in re.findall("`([^`]+)`", cell) for part in quote.split("...")
    )
    return [part for part in parts if len(part.split()) > 2 and not part.startswith("--")]


SOURCE = " ".join(
    re.sub(r'"\s*\n\s*f?"', "", path.read_text(encoding="utf-8"))
    for room in ("vllm_gaudi_ucm", "graphs", "ops", "tools")
    for path in (ROOT / room).rglob("*.py")
)


def test_the_page_quotes_messages() -> None:
    assert len(quoted()) >= 5


@pytest.mark.parametrize("message", quoted())
def test_a_quoted_message_is_in_the_code(message: str) -> None:
    assert message in FOREIGN or message in SOURCE
