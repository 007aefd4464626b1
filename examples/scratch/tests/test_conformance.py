"""The platform passes the core tier of Leadframe's conformance kit."""

from pathlib import Path

from leadframe.conformance import main


def test_core_tier(tmp_path: Path) -> None:
    """Runs the kit and checks its report."""
    assert main(["scratch", "--tier", "core", "--report", str(tmp_path / "report.json")]) == 0
    assert main(["verify", str(tmp_path / "report.json")]) == 0
