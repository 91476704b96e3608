"""What of a checkout travels to a lent machine by itself."""

import subprocess
from pathlib import Path


def travelling(root: Path) -> list[Path]:
    """Files that git tracks, and new ones that it does not ignore; relative to the root. Links travel as links."""
    command = ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = [Path(each) for each in sorted(set(listed.split("\0"))) if each]
    return [each for each in found if (root / each).is_symlink() or (root / each).is_file()]


def size_of(path: Path) -> int:
    """Bytes that travel for a file or a link."""
    return path.lstat().st_size
