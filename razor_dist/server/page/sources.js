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
    const place = conversation.documentAt(message, from);
    return { text, weight, turn: message >> 1, ...place, length: to - from };
  });
}

/** The list of an answer's sources; `documentsOf` gives a turn's documents. */
export function sourceItems(sources, documentsOf) {
  const shown = sources.filter(({ weight }, number) => number === 0 || weight >= LEAST);
  return shown.map((source, number) => {
    const item = document.createElement("li");
    const quote = source.text.length > QUOTE ? `${source.text.slice(0, QUOTE)}…` : source.text;
    const found = documentsOf(source.turn)[source.document];
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

/** An answer's text as nodes: a sentence that came from a document is a button that shows where. */
export function answerNodes(answer, sentences, documentsOf) {
  const nodes = [];
  let done = 0;
  for (const { start, end, sources } of sentences) {
    const source = sources.find(({ turn, document }) => documentsOf(turn)[document]);
    if (!source) continue;
    const [from, to] = [indexOf(answer, start), indexOf(answer, end)];
    const words = document.createElement("span"); // a button element would not break into lines
    words.className = "sentence";
    words.role = "button";
    words.tabIndex = 0;
    words.setAttribute("aria-haspopup", "dialog");
    words.textContent = answer.slice(from, to);
    const open = () => show(documentsOf(source.turn)[source.document], source, "Source of a sentence");
    words.addEventListener("click", open);
    words.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      open();
    });
    nodes.push(answer.slice(done, from), words);
    done = to;
  }
  return [...nodes, answer.slice(done)];
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
