// A conversation as Markdown, with the passages that its answers cite as footnotes.

import { codeFinder } from "./markdown.js";
import { citations } from "./sources.js";

export function toMarkdown(conversation, model) {
  const documentOf = (id) => conversation.documents.find((document) => document.id === id);
  const parts = [`# A conversation with ${plain(model)}`, new Date().toISOString().slice(0, 10)];
  const notes = [];
  for (const turn of conversation.turns) {
    parts.push(`## ${oneLine(turn.question)}`);
    const list = turn.documents.map(({ name, text }) => `- ${plain(name)}, ${text.length} characters`);
    if (list.length) parts.push(list.join("\n"));
    const { passages, sentences } = citations(turn, documentOf);
    parts.push(withNotes(turn.answer, sentences, notes.length));
    for (const { document, begin, length, text } of passages) {
      const { name } = documentOf(document);
      notes.push(`[^${notes.length + 1}]: ${plain(name)}, characters ${begin} to ${begin + length}: “${plain(text)}”`);
    }
    if (turn.note) parts.push(`(${turn.note})`);
  }
  return [...parts, ...notes].join("\n\n") + "\n";
}

/** An answer with the marks of its footnotes, whose numbers go on behind `before`. */
function withNotes(answer, sentences, before) {
  let [made, done] = ["", 0];
  const codeAt = codeFinder(answer);
  for (const { to, passages } of sentences) {
    const marks = passages.map(({ number }) => `[^${before + number}]`).join("");
    // Code would take marks for its own text: they stand behind it, behind a block as a paragraph.
    const code = codeAt(to);
    const at = Math.max(done, code?.to ?? to);
    made += answer.slice(done, at) + (code && code.name !== "InlineCode" ? `\n\n${marks}` : marks);
    done = at;
  }
  return made + answer.slice(done);
}

const oneLine = (text) => text.trim().replace(/\s+/g, " ");

/** A text that Markdown shows as it is. */
const plain = (text) => oneLine(text).replace(/[\\`*_[\]<>#|~&$!^]/g, "\\$&");
