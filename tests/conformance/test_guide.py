"""The guide says what the code does."""

import re
from pathlib import Path

import pytest

import leadframe.platform as contract
from leadframe.conformance.case import GROUPS
from leadframe.conformance.evidence import LEVELS
from leadframe.platform import MEMBERS

GUIDE = Path(__file__).parents[2] / "docs/backends"
PAGES = sorted(GUIDE.glob("*.md"))


def test_every_member_is_described():
    text = (GUIDE / "members.md").read_text()
    assert not [name for name in MEMBERS if f"`{name}" not in text]


def test_every_group_and_level_is_described():
    text = (GUIDE / "conformance.md").read_text()
    assert all(f"| {group} {title} |" in text for group, title in GROUPS.items())
    assert all(f"| `{level}` |" in text for level in LEVELS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_line_counts_of_the_examples_are_true():
    rows = re.findall(r"\[`examples/([\w-]+)`\].*?\| (\d+) \|", (GUIDE / "README.md").read_text())
    assert len(rows) == 3
    for name, count in rows:
        sources = (GUIDE.parents[1] / "examples" / name / "src").rglob("*.py")
        assert sum(len(path.read_text().splitlines()) for path in sources) == int(count), name


def test_names_of_the_contract_in_the_guide_exist():
    own = ("README", "first-hour", "hooks", "members", "conformance", "versions")
    text = "".join((GUIDE / f"{name}.md").read_text() for name in own)
    names = set(re.findall(r"`([A-Z][a-z]+[A-Z]\w+)`", text))
    known = set(contract.__all__) | {"TorchBackend", "DeviceLayer"}
    assert not names - known
