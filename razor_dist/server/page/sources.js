// Where an answer came from: passages of the documents, and a window that shows one.

import { $ } from "./views.js";

// Characters of a document that are shown on each side of a passage.
const AROUND = 20_000;
const QUOTE = 160;
// Passages of less weight were never the place that was asked for (docs/sources.md).
const LEAST = 0.05;

/** The index in a string of its n-th character: the server counts whole ones, not halves. */
function indexOf(text, n) {
  let index = 0;
  for (; n > 0 && index < text.length; n--) index += text.codePointAt(index) > 0xffff ? 2 : 1;
  return index;
}

/**
 * What the server's `sources` are in the conversation: the document's name and text, and where in
 * it; a passage of a question or an answer has no document.
 */
export function locate(sources, conversation) {
  const messages = conversation.messages();
  return sources.map(({ start, end, weight, text, message }) => {
    const { content } = messages[message];
    const from = indexOf(content, start);
    const to = from + indexOf(content.slice(from), end - start);
    return { text, weight, ...conversation.documentAt(message, from), length: to - from };
  });
}

/** A heading points at the passage below it and says nothing itself. */
const isHeading = (text) => /^#{1,6} [^\n]*$/.test(text.trim());

/** The list of an answer's sources; `documentOf` gives a document by its id. */
export function sourceItems(sources, documentOf) {
  const worth = sources.filter(({ weight, text }) => weight >= LEAST && !isHeading(text));
  const shown = worth.length ? worth : sources.slice(0, 1);
  return shown.map((source, number) => {
    const item = document.createElement("li");
    const quote = source.text.length > QUOTE ? `${source.text.slice(0, QUOTE)}…` : source.text;
    const found = documentOf(source.document);
    const words = document.createElement(found ? "button" : "span");
    words.className = "source";
    const quoted = document.createElement("bdi");
    quoted.textContent = quote;
    words.append(quoted);
    const about = document.createElement("span");
    about.className = "size";
    about.textContent = ` ${found ? `${found.name}, ` : ""}${Math.round(100 * source.weight)} %`;
    if (found) {
      words.type = "button";
      words.setAttribute("aria-haspopup", "dialog");
      words.addEventListener("click", () => show(found, source, `Source ${number + 1}`));
    }
    item.append(words, about);
    return item;
  });
}

/** The parts of an answer that came from a document, as marks for `markdown.js`. */
export function sentenceMarks(answer, sentences, documentOf) {
  return sentences.flatMap(({ start, end, sources }) => {
    const source = sources.find(({ document }) => documentOf(document));
    if (!source) return [];
    const [from, to] = [indexOf(answer, start), indexOf(answer, end)];
    const open = () => show(documentOf(source.document), source, "Source of a sentence");
    return [{ from, to, make: (isFirst) => sentencePiece(answer.slice(from, to), open, isFirst) }];
  });
}

/** A piece of a sentence; the first is a button for the whole, others answer to the pointer. */
function sentencePiece(sentence, open, isFirst) {
  const words = document.createElement("span"); // a button element would not break into lines
  words.className = "sentence";
  words.addEventListener("click", open);
  if (!isFirst) return words;
  Object.assign(words, { role: "button", tabIndex: 0, ariaHasPopup: "dialog", ariaLabel: sentence.trim() });
  words.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    open();
  });
  return words;
}

const NUMBER = /\d[\d.,]*/g;

/** Numbers of an answer that no source has as they are: "41.3" where the text has 41 and 41,300. */
export function strangeNumbers(answer, sentences, documentOf) {
  const numbersIn = (text) => (text.match(NUMBER) ?? []).map((one) => one.replace(/[.,]+$/, "").replaceAll(",", ""));
  const found = new Set();
  for (const { start, end, sources } of sentences) {
    const known = sources.filter(({ document }) => documentOf(document)).map(({ text }) => text);
    if (!known.length) continue;
    const said = answer.slice(indexOf(answer, start), indexOf(answer, end));
    const written = new Set(numbersIn(known.join(" ")));
    // The number of a list's item is the answer's own.
    for (const number of numbersIn(said.replace(/^\s*\d+[.)]\s/gm, ""))) if (!written.has(number)) found.add(number);
  }
  return [...found];
}

function show({ name, text }, { begin, length }, title) {
  $("reader-title").textContent = `${title}: ${name}`;
  const mark = document.createElement("mark");
  mark.textContent = text.slice(begin, begin + length);
  const first = Math.max(0, begin - AROUND);
  const last = Math.min(text.length, begin + length + AROUND);
  $("reader-text").replaceChildren(
    (first > 0 ? "…" : "") + text.slice(first, begin),
    mark,
    text.slice(begin + length, last) + (last < text.length ? "…" : ""),
  );
  $("reader").showModal();
  mark.scrollIntoView({ block: "center" });
  $("reader-text").focus({ preventScroll: true });
}
