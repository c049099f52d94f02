"""The table of docs/clients.md claims exactly what the tests try."""

from tests.clients import table


def test_every_cell_is_a_test_and_every_test_a_cell() -> None:
    assert table.shown(table.PAGE.read_text()) == set(table.declared())


def test_every_client_is_a_column() -> None:
    assert {client for client, _ in table.declared()} == set(table.CLIENTS)


def test_a_table_says_what_it_was_made_of() -> None:
    """Written cells can be read again, and a cell that is not there is not claimed."""
    cells = {("curl", "chat"), ("llm", "chat"), ("llm", "tools")}
    text = table.table(cells, dict.fromkeys(table.CLIENTS, "1.0"))

    assert table.shown(f"{table.BEGIN}\n{text}\n{table.END}") == cells
    assert text.index("| chat |") < text.index("| tools |")


def test_nothing_but_the_table_is_written() -> None:
    """Empty tables are replaced too: one was once replaced wherever a line ended."""
    page = f"one\ntwo\n{table.BEGIN}\n{table.END}\nthree\n"
    written = f"one\ntwo\n{table.BEGIN}\n| a |\n{table.END}\nthree\n"

    assert table.with_table(page, "| a |") == written
    assert table.with_table(written, "| a |") == written
