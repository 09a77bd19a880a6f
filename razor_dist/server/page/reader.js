// The text of the documents beside the conversation: a tab for each, the passages of an answer lit.
//
// A text is laid out in chunks of which the browser renders only those in view
// (`content-visibility`), so that megabytes are no work, and the browser's own search finds all.

import { $ } from "./dom.js";
import { count, plural } from "./format.js";
import { endOf } from "./parts.js";

const CHUNK = 8000; // characters
const LINE = 70; // about how many characters a line has, for the height of what is not rendered
// As in style.css: from here on the text has a column of its own, below it is a window.
const WIDE = matchMedia("(min-width: 60rem)");

/** Yields {begin, end} of the chunks of a text, ended at a paragraph, line or word. */
function* chunksOf(text) {
  for (let begin = 0, end; begin < text.length; begin = end) {
    end = endOf(text, begin, CHUNK);
    yield { begin, end };
  }
}

export const isSame = (one, other) => one.document === other.document && one.begin === other.begin;

class Reader {
  constructor() {
    Object.assign(this, { documents: [], shown: null, chunks: [], passages: [], pointed: [], opener: null });
    this.onPoint = () => {}; // gets the lit passage that the pointer is at, or null
    this.scrolled = new Map(); // by document, where its text was left
    this.isLeftAlone = true; // the text was not moved by hand since the last question
    this.litAs = null; // what `light` was last called for
    this.at = null; // the passage that was brought into view last
    this.place = $("reader-text");
    for (const event of ["wheel", "pointerdown", "keydown"]) {
      $("reader").addEventListener(event, () => (this.isLeftAlone = false), { passive: true });
    }
    $("reader-tabs").addEventListener("keydown", (event) => this.moveTab(event));
    $("reader").addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !this.isBeside || !this.opener) return;
      event.stopPropagation(); // an answer that is being written goes on
      this.back();
    });
    $("reader").addEventListener("close", () => this.isBeside || this.back());
    $("close-reader").addEventListener("click", () => $("reader").close());
    $("previous-passage").addEventListener("click", () => this.step(-1));
    $("next-passage").addEventListener("click", () => this.step(1));
    for (const event of ["pointerover", "pointerout"]) {
      this.place.addEventListener(event, ({ target }) => {
        const mark = event === "pointerover" && target.closest("mark");
        this.onPoint(mark ? this.passages[mark.dataset.passage] : null);
      });
    }
    WIDE.addEventListener("change", () => this.lay());
  }

  get isBeside() {
    return WIDE.matches;
  }

  /** Has a tab for each of the documents. */
  sync(documents) {
    const isSame = documents.length === this.documents.length && documents.every((one, at) => one === this.documents[at]);
    this.documents = documents;
    if (isSame) return;
    this.select(documents.includes(this.shown) ? this.shown : (documents.at(-1) ?? null));
    this.lay();
  }

  lay() {
    const dialog = $("reader");
    const isWanted = this.documents.length > 0;
    if (dialog.matches(":modal") && (this.isBeside || !isWanted)) dialog.close();
    // Not by `show`, which would take the focus.
    if (!dialog.matches(":modal")) dialog.open = this.isBeside && isWanted;
    document.body.classList.toggle("reads", isWanted);
  }

  showTabs() {
    const tabs = this.documents.map((one, at) => {
      const tab = document.createElement("button");
      const name = document.createElement("bdi");
      name.textContent = one.name.split("/").at(-1);
      Object.assign(tab, { type: "button", id: `tab-${at}`, role: "tab", title: one.name });
      tab.append(name);
      const lit = this.passages.filter((passage) => passage.document === one.id).length;
      if (lit) {
        const number = document.createElement("span");
        Object.assign(number, { className: "badge", textContent: lit, title: plural(lit, "passage") });
        tab.append(" ", number);
      }
      const isShown = one === this.shown;
      tab.setAttribute("aria-selected", isShown);
      tab.setAttribute("aria-controls", "reader-text");
      tab.tabIndex = isShown ? 0 : -1;
      tab.addEventListener("click", () => this.select(one));
      return tab;
    });
    const hadFocus = $("reader-tabs").contains(document.activeElement);
    $("reader-tabs").replaceChildren(...tabs);
    const selected = tabs[this.documents.indexOf(this.shown)];
    if (!selected) return;
    this.place.setAttribute("aria-labelledby", selected.id);
    const strip = $("reader-tabs");
    strip.scrollLeft = selected.offsetLeft - strip.offsetLeft - (strip.clientWidth - selected.offsetWidth) / 2;
    if (hadFocus) selected.focus();
  }

  moveTab(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    if (!step) return;
    event.preventDefault();
    const at = this.documents.indexOf(this.shown);
    const last = this.documents.length - 1;
    const next = Number.isFinite(step) ? (at + step + last + 1) % (last + 1) : step < 0 ? 0 : last;
    this.select(this.documents[next]);
  }

  /** Shows a document's text, where it was left. */
  select(one) {
    if (this.shown) this.scrolled.set(this.shown.id, this.place.scrollTop);
    if (one !== this.shown) {
      this.chunks = one ? [...chunksOf(one.text)] : [];
      for (const chunk of this.chunks) {
        const text = one.text.slice(chunk.begin, chunk.end);
        chunk.element = document.createElement("div");
        chunk.element.textContent = text;
        const lines = text.split("\n").reduce((sum, line) => sum + Math.ceil((line.length || 1) / LINE), 0);
        chunk.element.style.containIntrinsicBlockSize = `auto ${1.5 * lines}em`;
      }
      Object.assign(this, { shown: one, litAs: null });
      this.place.replaceChildren(...this.chunks.map(({ element }) => element));
      if (one) this.place.scrollTop = this.scrolled.get(one.id) ?? 0;
    }
    this.light(this.passages);
  }

  /** Lights passages {document, begin, length, number}, and no others. */
  light(passages, onPoint = this.onPoint) {
    const key = JSON.stringify([this.shown?.id, this.documents.map(({ id }) => id), passages]);
    Object.assign(this, { passages, onPoint });
    if (key === this.litAs) return;
    this.litAs = key;
    const mine = passages
      .map((passage, at) => ({ begin: passage.begin, end: passage.begin + passage.length, at }))
      .filter(({ at }) => passages[at].document === this.shown?.id)
      .sort((one, other) => one.begin - other.begin);
    for (const chunk of this.chunks) {
      const marks = mine.filter(({ begin, end }) => begin < chunk.end && end > chunk.begin);
      const key = marks.map(({ begin, end, at }) => `${begin} ${end} ${at}`).join();
      if (key === (chunk.key ?? "")) continue;
      chunk.key = key;
      chunk.element.replaceChildren(...this.pieces(chunk, marks));
    }
    this.showTabs();
    this.point(this.pointed);
    $("reader-where").hidden = passages.length < 2;
    $("reader-where-words").textContent = `${count(passages.length)} passages`;
  }

  pieces({ begin, end }, marks) {
    const { text } = this.shown;
    const pieces = [];
    let done = begin;
    for (const mark of marks) {
      const [from, to] = [Math.max(done, mark.begin), Math.min(end, mark.end)];
      if (from >= to) continue;
      const element = document.createElement("mark");
      element.dataset.passage = mark.at;
      element.dataset.number = this.passages[mark.at].number;
      element.textContent = text.slice(from, to);
      pieces.push(text.slice(done, from), element);
      done = to;
    }
    return [...pieces, text.slice(done, end)];
  }

  /** Lights some of the passages more than the others. */
  point(passages) {
    this.pointed = passages;
    for (const mark of this.place.querySelectorAll("mark")) {
      mark.classList.toggle("pointed", passages.some((one) => isSame(one, this.passages[mark.dataset.passage])));
    }
  }

  /** Brings a passage into view, in its tab. */
  bring(passage) {
    const one = this.documents.find(({ id }) => id === passage.document);
    if (!one) return;
    this.at = passage;
    this.select(one);
    const number = this.passages.findIndex((other) => isSame(other, passage));
    const mark = this.place.querySelector(`mark[data-passage="${number}"]`);
    // What is not rendered has an estimated height; a frame later it is known.
    const toMark = () => {
      if (!mark?.isConnected) return;
      const [box, frame] = [mark.getBoundingClientRect(), this.place.getBoundingClientRect()];
      this.place.scrollTop += box.top - frame.top - Math.max(0, (frame.height - box.height) / 3);
    };
    toMark();
    requestAnimationFrame(() => (toMark(), requestAnimationFrame(toMark)));
  }

  /** Brings a passage into view unless the reader of the page has moved the text. */
  follow(passage) {
    if (this.isBeside && this.isLeftAlone) this.bring(passage);
  }

  /** Opens a passage, or a document without one, for reading; `back` returns to the `opener`. */
  open(passage, one = null) {
    this.opener = document.activeElement;
    if (!this.isBeside && !$("reader").open) $("reader").showModal();
    if (passage) this.goTo(passage);
    else this.select(one);
    this.place.focus({ preventScroll: true });
  }

  goTo(passage) {
    this.bring(passage);
    this.point([passage]);
  }

  back() {
    this.opener?.focus();
    this.opener = null;
  }

  /** Goes to the next passage, or the one before, through all tabs. */
  step(by) {
    const { length } = this.passages;
    const at = this.passages.findIndex((one) => this.at && isSame(one, this.at));
    this.goTo(this.passages[at < 0 ? (by > 0 ? 0 : length - 1) : (at + by + length) % length]);
  }
}

export const reader = new Reader();
