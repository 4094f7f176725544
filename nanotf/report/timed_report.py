"""Base of reports of times: users print a table, draw a picture, write a trace."""

from __future__ import annotations

import base64
import html
import importlib.util
import io
import os
from typing import TYPE_CHECKING

from nanotf.errors import NanoError, UnavailableError
from nanotf.report import chrome_trace
from nanotf.report.timeline import Track

if TYPE_CHECKING:
    from nanotf.report.chart import Chart


class TimedReport:
    """Times of some processes. Its text is a table."""

    @property
    def title(self) -> str:
        """The measured call or step, in a line."""
        raise NotImplementedError

    def _tracks(self) -> list[Track]:
        """Returns the timeline of each process; none if nothing was timed."""
        raise NotImplementedError

    def _chart(self) -> Chart:
        """Returns the picture, to be drawn."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        """Returns the text for a notebook, and the picture if matplotlib is installed."""
        text = f"<pre>{html.escape(str(self))}</pre>"
        # A notebook shows the text alone, where `plot` would raise.
        if importlib.util.find_spec("matplotlib") is None or not self._tracks():
            return text
        picture = io.BytesIO()
        self._chart().draw(picture)
        encoded = base64.b64encode(picture.getvalue()).decode()
        return f'{text}<img alt="timeline of all processes" src="data:image/png;base64,{encoded}">'

    def plot(self, path: str | os.PathLike[str] = "nanotf_report.png") -> str:
        """Draws a row for each process: its timeline, and a bar with its sums.

        Args:
            path: str or path-like, default "nanotf_report.png"; the suffix sets the format.

        Returns:
            The path.

        Raises:
            NanoError: matplotlib is not installed.
            UnavailableError: Nothing was timed.
        """
        self._check_timed(f"plot({os.fspath(path)!r})")
        try:
            import matplotlib  # noqa: F401
        except ImportError as error:
            raise NanoError(
                "plot() draws with matplotlib, which is not installed. Received: "
                f"plot({os.fspath(path)!r}). Run `pip install matplotlib`, or use "
                "to_chrome_trace(), which needs nothing."
            ) from error
        self._chart().draw(path)
        return os.fspath(path)

    def to_chrome_trace(self, path: str | os.PathLike[str]) -> str:
        """Writes the timeline, a track for each process, for https://ui.perfetto.dev.

        Args:
            path: str or path-like, of the JSON file, which chrome://tracing reads, too.

        Returns:
            The path.

        Raises:
            UnavailableError: Nothing was timed.
        """
        self._check_timed(f"to_chrome_trace({os.fspath(path)!r})")
        chrome_trace.write(path, self.title, self._tracks())
        return os.fspath(path)

    def _check_timed(self, asked: str) -> None:
        if not self._tracks():
            raise UnavailableError(
                f"Pictures and traces show times, and this report has none. Received: {asked} of "
                f"{self.title}. Print the report."
            )
