"""What of a checkout travels to a lent machine by itself."""

import subprocess
from pathlib import Path


def travelling(root: Path) -> list[Path]:
    """Files that git tracks, and new ones that it does not ignore; relative to the root."""
    command = ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [Path(each) for each in sorted(set(listed.split("\0"))) if each and (root / each).is_file()]
