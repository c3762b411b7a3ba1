"""What commands print: tables by rich where it is installed and someone looks, else plain text."""

import sys
from collections.abc import Sequence


class Console:
    """Prints lines and tables to stdout, and what went wrong to stderr.

    Args:
        pretty: Use rich. Default: where it can be imported and stdout is a terminal; in a pipe its
            frames and line breaks would be in the way.
    """

    def __init__(self, pretty: bool | None = None):
        self._rich = None
        if pretty or (pretty is None and sys.stdout.isatty()):
            self._rich = _import_rich()

    def line(self, text: str = "") -> None:
        """One line, as it is."""
        if self._rich is None:
            print(text)
        else:
            self._rich.print(text, markup=False, highlight=False)

    def table(self, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """The first column is text, the others are numbers. An empty `head` shows none."""
        if self._rich is None:
            print(plain_table(title, head, rows))
            return
        from rich.table import Table
        from rich.text import Text

        made = Table(title=Text(title, "bold"), title_justify="left", show_header=bool(head))
        columns = len(head or rows[0])
        for number in range(columns):
            name = Text(head[number]) if head else ""
            made.add_column(name, justify="left" if number == 0 or columns == 2 else "right")
        for row in rows:
            made.add_row(*(Text(cell) for cell in row))
        self._rich.print(made)


def plain_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The table as text: the title, then columns two spaces apart."""
    every = [head, *rows] if head else rows
    widths = [max(len(row[number]) for row in every) for number in range(len(every[0]))]
    two = len(widths) == 2

    def text(row: Sequence[str]) -> str:
        cells = [row[0].ljust(widths[0])]
        cells += [
            cell.ljust(width) if two else cell.rjust(width)
            for cell, width in zip(row[1:], widths[1:], strict=True)
        ]
        return ("  " + "  ".join(cells)).rstrip()

    return "\n".join([title, *map(text, every)])


def _import_rich():
    try:
        from rich.console import Console as RichConsole
    except ImportError:
        return None
    return RichConsole()
