// Where an answer came from: passages of the documents, and a window that shows one.

import { $ } from "./views.js";

// Characters of a document that are shown on each side of a passage.
const AROUND = 20_000;
const QUOTE = 160;

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
    const place = conversation.documentAt(message, from);
    return { text, weight, turn: message >> 1, ...place, length: to - from };
  });
}

/** The list of an answer's sources; `documentsOf` gives a turn's documents. */
export function sourceItems(sources, documentsOf) {
  return sources.map((source, number) => {
    const item = document.createElement("li");
    const quote = source.text.length > QUOTE ? `${source.text.slice(0, QUOTE)}…` : source.text;
    const found = documentsOf(source.turn)[source.document];
    const words = document.createElement(found ? "button" : "span");
    words.className = "source";
    const shown = document.createElement("bdi");
    shown.textContent = quote;
    words.append(shown);
    const about = document.createElement("span");
    about.className = "size";
    about.textContent = ` ${found ? `${found.name}, ` : ""}${Math.round(100 * source.weight)} %`;
    if (found) {
      words.type = "button";
      words.setAttribute("aria-haspopup", "dialog");
      words.addEventListener("click", () => show(found, source, number + 1));
    }
    item.append(words, about);
    return item;
  });
}

function show({ name, text }, { begin, length }, number) {
  $("reader-title").textContent = `Source ${number}: ${name}`;
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
