"""Texts of files of every kind, and what is said of those that have none."""

from __future__ import annotations

import gzip
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pypdfium2  # type: ignore[import-untyped]
import pytest

from razor_dist.config.errors import DocumentError
from razor_dist.documents import pdf, read
from razor_dist.documents.collect import collect
from razor_dist.documents.detect import detect_kind
from razor_dist.documents.read import ReadLimits, kind_of, read_document
from tests.documents import files
from tests.documents.files import FIRST, SECOND, TITLE, text_of
from tests.server.process import wait_until


@pytest.mark.parametrize(
    ("data", "kind", "text"),
    [
        ("# Été\r\n\r\nun".encode("utf-8-sig"), "text", "# Été\n\nun"),
        ("Été".encode("utf-16"), "text", "Été"),
        (
            files.html(),
            "html",
            f"# {TITLE}\n\n{FIRST}\n\n- café\n\nIt is lazy & old.\n\na  b\n c",
        ),
        (files.pdf(FIRST, SECOND), "pdf", f"{FIRST}\n\n{SECOND}"),
        (files.pdf(FIRST, password=""), "pdf", FIRST),
        (files.pdf_form("Ann", "Call her."), "pdf", "Name Ann Call her."),
        (files.pdf_form(None, "Call her."), "pdf", "Name Call her."),
        (files.epub(), "epub", f"# {TITLE}\n\n{FIRST}\n\n{SECOND}"),
        (
            files.epub(encrypted_by="http://www.idpf.org/2008/embedding"),
            "epub",
            f"# {TITLE}\n\n{FIRST}\n\n{SECOND}",
        ),
        (files.docx(), "docx", f"# {TITLE}\n\n{FIRST}\n\nleft\tright\n\n{SECOND}"),
    ],
    ids=[
        *("utf-8", "utf-16", "html", "pdf", "pdf-no-password", "pdf-form", "pdf-note"),
        *("epub", "epub-fonts", "docx"),
    ],
)
def test_the_text_of_a_document(data: bytes, kind: str, text: str) -> None:
    assert read_document(data, kind).text == text


@pytest.mark.parametrize(
    ("data", "kind", "problem"),
    [
        (b"", "text", "holds no text"),
        (b" \n\t", "text", "holds no text"),
        (b"caf\xe9", "text", "is not UTF-8 text .*--encoding latin-1"),
        (b"a\0b", "text", "is a binary file"),
        (b"<html><script>x</script></html>", "html", "holds no text"),
        (b"", "pdf", "cannot be read as pdf"),
        (files.pdf(FIRST)[:300], "pdf", "cannot be read as pdf"),
        (files.pdf("", ""), "pdf", "holds no text on its 2 pages"),
        (files.pdf(FIRST, password="secret"), "pdf", "is encrypted"),
        (files.epub()[:200], "epub", "cannot be read as epub"),
        (files.epub(without="META-INF/container.xml"), "epub", "lacks the file META-INF"),
        (files.epub(without="OEBPS/text/one.xhtml"), "epub", "lacks the file OEBPS/text/one"),
        (files.epub(encrypted_by="http://www.w3.org/2001/04/xmlenc#aes256-cbc"), "epub", "is encr"),
        (files.docx()[:500], "docx", "cannot be read as docx"),
        (bytes.fromhex("d0cf11e0a1b11ae1"), "docx", "is encrypted, or a .doc file"),
    ],
)
def test_a_document_without_text_is_refused(data: bytes, kind: str, problem: str) -> None:
    with pytest.raises(DocumentError, match=f"^{problem}"):
        read_document(data, kind)


MANY = 200_000
PAGE = "<p>a page</p>"


@pytest.mark.long
@pytest.mark.parametrize(
    ("data", "kind", "limits", "problem"),
    [
        (files.pdf_of_references(30_000), "pdf", {}, "has 30,000 pages, more than 20,000"),
        (files.epub(page="<p/>" * MANY), "epub", {"seconds": 1}, "takes more than 1 s of the"),
        (files.epub(page="<p/>" * MANY), "epub", {"memory": 2**27}, "needs more than 134,217,728"),
        (files.docx_of_paragraphs(10**6), "docx", {"memory": 2**27}, "needs more than 134,217,728"),
        (files.pdf("word " * 99), "pdf", {"characters": 300}, "holds more than 300 characters"),
        (b"word " * 99, "text", {"characters": 300}, "holds more than 300 characters"),
        (b"word " * 99, "text", {"characters": 100}, "is larger than 400 bytes"),
        (gzip.compress(bytes(2**28)), "text", {"memory": 2**28}, "is larger than 134,217,728"),
    ],
)
def test_documents_that_would_take_all_there_is(
    data: bytes, kind: str, limits: dict[str, int], problem: str
) -> None:
    """Each is small: it fails alone, in a process of its own, and the bound is named."""
    assert len(data) < 500_000
    with pytest.raises(DocumentError, match=f"^{problem}"):
        read_document(data, kind, gz=data[:2] == b"\x1f\x8b", limits=ReadLimits(**limits))


def test_a_page_that_the_spine_repeats_is_read_once() -> None:
    assert text_of(files.epub(page=PAGE, times=500), "epub") == "a page"


def test_compressed_files_and_other_encodings() -> None:
    assert read_document(gzip.compress("Été".encode()), "text", gz=True).text == "Été"
    assert read_document(gzip.compress(files.pdf(FIRST)), "pdf", gz=True).text == FIRST
    with pytest.raises(DocumentError, match="cannot be read as text: Not a gzipped file"):
        read_document(b"x", "text", gz=True)
    assert read_document(b"caf\xe9", "text", encoding="latin-1").text == "café"
    assert read_document("café".encode(), "text", encoding="latin-1").text == "café"
    with pytest.raises(DocumentError, match=r"is not SHIFT_JIS text .*; convert it"):
        read_document(b"\xff\xff", "text", encoding="shift_jis")


@pytest.mark.parametrize(
    ("flaw", "said"),
    [
        ("AT&T and R & D", "AT&T and R & D"),
        ("a < b", "a < b"),
        ("a<br>b", "a\nb"),
        ("a<br>b</br>", "a\nb"),
        ("a<hr>b", "a\n\nb"),
        ("<span class=x>t</span>", "t"),
        ('<b id="a" id="a">t</b>', "t"),
        ('<a href="x?a=1&b=2">t</a>', "t"),
        ("<a id='x'/>&nbsp;& <script src='x'/>t<img src='x'/>", "& t"),
    ],
)
def test_a_page_of_a_book_is_read_to_its_end(flaw: str, said: str) -> None:
    """A parser of XML stops at the first of these mistakes; a browser goes on."""
    data = files.epub(page=f"<p>First {flaw} end.</p><p>Last</p>")
    assert text_of(data, "epub") == f"First {said} end.\n\nLast"


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("<h1><img src='x'></h1><p>first</p><p>second</p>", "first\n\nsecond"),
        ("<ul><li></li></ul><p>first</p>", "first"),
        ("<ul><li><p>first</p></li></ul><p>second</p>", "- first\n\nsecond"),
    ],
)
def test_the_mark_of_an_empty_element_is_no_others(page: str, text: str) -> None:
    assert text_of(page.encode(), "html") == text


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("10<sup>6</sup> m<sup>2</sup>, 2<sup>n+1</sup>", "10^6 m^2, 2^(n+1)"),
        ("the 1<sup>st</sup> of May<sup>[1]</sup>", "the 1st of May[1]"),
        (
            "<table><tr><th>a<th>b<th>c<tr><td>1<td> <td>3<tr><td>4<td><tr><td><td></table>",
            "a\tb\tc\n\n1\t\t3\n\n4\t",
        ),
        (
            "<table><tr><td><p>a</p><td><div> <p>1</p></div><tr><td><p>b</p><p>c</p><td>2</table>",
            "a\t1\n\nb\n\nc\n\n\t2",
        ),
        ("<pre><code><b>a = 1<br></b><b># b<br></b></code></pre>", "a = 1\n # b"),
        ("<ruby>漢<rp>(</rp><rt>かん</rt><rp>)</rp>字<rt>じ</rt></ruby>", "漢(かん)字(じ)"),
        ("<ol start=3><li>c<li value=7>g<li>h</ol>", "3. c\n\n7. g\n\n8. h"),
        ("<ol reversed><li>b<ol type=i><li>x</ol><li>a</ol>", "2. b\n\ni. x\n\n1. a"),
        ("<ol type=A start=26><li>z<li>y</ol><ul><li>x</ul>", "Z. z\n\nAA. y\n\n- x"),
        ("<math alttext='x^2'><mi>x</mi></math>", "x^2"),
        (
            "<math><semantics><mi>y</mi><annotation encoding='application/x-tex'>y_1"
            "</annotation></semantics></math>",
            "y_1",
        ),
        (
            "<math><mfrac><mn>1</mn><mrow><mn>2</mn><msup><mi>a</mi><mn>2</mn></msup></mrow>"
            "</mfrac><msqrt><mi>b</mi></msqrt></math>",
            "1/(2a^2)√b",
        ),
        (
            "<body><header><nav><h2>Menu</h2></nav><h1>One</h1>at home</header>first</body>",
            "# One\n\nfirst",
        ),
    ],
)
def test_what_a_page_shows_by_its_form(page: str, text: str) -> None:
    assert text_of(page.encode(), "html") == text


def test_readings_in_a_book_have_parentheses_once() -> None:
    page = "<p><ruby>漢<rp>(</rp><rt>かん</rt><rp>)</rp>字<rt>じ</rt></ruby></p>"
    assert text_of(files.epub(page=page), "epub") == "漢(かん)字(じ)"


@pytest.mark.parametrize(
    ("page", "text"),
    [
        (
            "<meta charset=utf-8><p>Größe für</p>".encode() + b"<p>cut \xc3</p>",
            "Größe für\n\ncut \ufffd",
        ),
        ("<p>Größe für</p>".encode() + b"<p>cut \xc3</p>", "Größe für\n\ncut \ufffd"),
        (b"<meta charset=iso-8859-1><p>don\x92t \x93\xe9\x94", "don\u2019t \u201cé\u201d"),
        ("<meta charset=shift_jis><p>日本語".encode("shift_jis"), "日本語"),
        ("<p>Größe".encode("utf-16"), "Größe"),
    ],
)
def test_the_encoding_of_a_page_is_that_of_a_browser(page: bytes, text: str) -> None:
    assert text_of(page, "html") == text


@pytest.mark.parametrize("tag", ["<b>", "<div>"])
def test_elements_that_are_never_closed_are_read(tag: str) -> None:
    page = f"<p>first</p>{f'{tag}word ' * 20_000}"
    text = read_document(page.encode(), "html").text
    assert text.split() == ["first", *["word"] * 20_000]


@pytest.mark.parametrize(
    ("text", "written", "encoding"),
    [
        ("Hello", "utf-16-le", "utf-16-le"),
        ("Hello", "utf-16-be", "utf-16-be"),
        ("Hello", "utf-32", "utf-32"),
        ("日本語の文書", "iso2022_jp", "iso2022_jp"),
        ("\x1b[31mrot\x1b[0m: é", "utf-8", "latin-1"),
        ("日本語", "utf-8", "utf-16-le"),
    ],
)
def test_bytes_that_are_utf_8_too_are_read_as_what_they_are(
    tmp_path: Path, text: str, written: str, encoding: str
) -> None:
    for name in ("a.txt", "a", "a.txt.gz"):
        data = text.encode(written)
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    sources, left_out = collect([str(tmp_path)], encoding)
    assert [source.read().text for source in sources] == [text] * 3 and not left_out


def test_half_characters_are_replaced() -> None:
    assert read.checked_text("a\ud800b \U0001f98a") == "a\ufffdb \U0001f98a"


def test_comments_before_a_page_or_a_text() -> None:
    comments = b"<!-- > -- -->\n" * 500
    assert detect_kind(comments + b"<html>", None) == "html"
    assert detect_kind(comments + b"text", None) == "text"


def test_a_pdf_may_begin_with_something_else() -> None:
    """As after a mail's header; PDF readers look for its own in the first 1,024 bytes."""
    data, before = files.pdf("Paris"), b"From: a\n\0\n"
    assert detect_kind(before + data, "pdf") == "pdf"
    assert "Paris" in read.read_document(before + data, "pdf").text
    with pytest.raises(DocumentError, match="is no pdf file, whatever its name says"):
        detect_kind(b" " * 1024 + b"From: a %PDF-", "pdf")
    assert detect_kind(b"A file that begins with %PDF- is a PDF.", "text") == "text"


def test_rtf_is_no_text() -> None:
    with pytest.raises(DocumentError, match="is RTF, which is not read; save it as docx or PDF"):
        detect_kind(rb"{\rtf1\ansi Hello}", None)


def test_kinds_by_names() -> None:
    names = "GPL-3 LGPL-2.1 a.TXT a.md a.Htm a.PDF a.epub a.png a.txt.gz a"
    names += ".gz" * 2000
    kinds = [kind_of(Path(name)) for name in names.split()]
    assert kinds == ["text"] * 4 + ["html", "pdf", "epub", None, "text", None]


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "find_spec", lambda name: None if name == "lxml" else object())
    assert read_document(b"plain", "text").text == "plain"
    wanted = (
        r"^epub documents are read with lxml, which is not installed: pip install .*documents\]"
    )
    with pytest.raises(DocumentError, match=wanted):
        read_document(files.epub(), "epub")


@pytest.mark.parametrize(
    ("code", "retryable"), [(-signal.SIGKILL, True), (-signal.SIGSEGV, False), (3, False)]
)
def test_a_reader_that_was_killed_says_nothing_of_the_document(code: int, retryable: bool) -> None:
    with pytest.raises(DocumentError) as raised:
        read.reader_output(code, b"is broken", ReadLimits())
    assert pickle.loads(pickle.dumps(raised.value)).retryable == retryable
    assert ReadLimits().too_slow().retryable


def test_a_reader_dies_before_others_when_memory_is_short() -> None:
    arguments = read.reader_arguments("text", limits=ReadLimits())
    command = [sys.executable, "-P", "-m", "razor_dist.documents.read", arguments]
    environment = read.reader_environment()
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment) as process:
        score = Path(f"/proc/{process.pid}/oom_score_adj")
        try:
            assert wait_until(lambda: score.read_text() == "1000\n", 20)
        finally:
            process.kill()


def test_sentences_of_a_page_are_whole_wherever_its_lines_end() -> None:
    fact = "The special magic number of London is 109998."
    broken = 0
    for words in range(16):
        data = files.pdf(f"It goes on {'and on ' * words}here. {fact} " + "And so on it goes. " * 9)
        [page] = pdf.read(data, ReadLimits())
        assert fact in page
        [raw] = pypdfium2.PdfDocument(data)
        broken += fact not in raw.get_textpage().get_text_bounded()
    assert broken > 3
    rows = "\n".join(f"Paris and its surroundings and people: {n}00" for n in range(5))
    for lines in ("Mon\nTue\nWed\nThu", rows, f"A Heading\n{'Many words of prose. ' * 4}"):
        [page] = pdf.read(files.pdf(lines), ReadLimits())
        assert page == lines.strip()
