"""What every process prints, in a file of its own: gpu1-server.log, gpu1-trainer-0.log. Files only grow."""

import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from hoploom.closing import Closing
from hoploom.errors import ConfigError


class LogFiles(Closing):
    """A folder of files, one per speaker, each opened with its first line.

    >>> with LogFiles(Path("logs")) as logs:
    ...     logs.write("gpu1/trainer-0", "epoch 1")
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self._files: dict[str, TextIO] = {}
        self._began = time.strftime("%Y-%m-%d %H:%M:%S")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--logs is {folder}, which cannot be made ({error.strerror}); give another folder"
            ) from error

    def write(self, speaker: str, line: str) -> None:
        """One line; OSError where the file cannot be written."""
        if speaker not in self._files:
            path = self.folder / f"{speaker.replace('/', '-')}.log"
            self._files[speaker] = path.open("a", encoding="utf-8", buffering=1)
            self._files[speaker].write(f"--- {speaker}, launched {self._began}\n")
        self._files[speaker].write(f"{line}\n")

    def close(self) -> None:
        for file in self._files.values():
            with suppress(OSError):
                file.close()
