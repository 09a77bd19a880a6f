// The list of documents: adding, removing, and what to do with one that is too long.

import * as api from "./api.js";
import { newId } from "./conversation.js";
import { $, button } from "./dom.js";
import { count, plural, roughTokens } from "./format.js";
import { beginning, countTokens, roomFor } from "./parts.js";
import { reader } from "./reader.js";
import { app, changed } from "./state.js";
import * as store from "./store.js";
import { documentItem, documentSize } from "./views.js";
import { announce, notice, tell } from "./words.js";

// Encodings that a text may be read in if it is not UTF-8, by the browser's names.
const ENCODINGS = { "windows-1252": "Western (Latin-1)", "iso-8859-2": "Central European (Latin-2)", "windows-1251": "Cyrillic", "shift_jis": "Japanese", gb18030: "Chinese" };

// Of the files that are being read; askLater: a question waits for them.
export const uploads = { running: 0, askLater: false, aborts: new Set() };

/** Ends all that is being read, and asks nothing when it has ended. */
export function endUploads() {
  uploads.askLater = false;
  for (const abort of uploads.aborts) abort.abort();
}

// Why the tokens of a document could not be counted, by the document.
const uncounted = new WeakMap();

export async function addFiles(files) {
  const all = [...files].map(begun); // all are shown and waited for, and read in their order
  for (const one of all) await read(one);
}

/** Counts the tokens of documents that were added while the server did not tell how many it holds, or of `all`. */
export async function countAll(all = false) {
  let isNews = false;
  for (const document of app.conversation.pending.filter(({ tokens }) => all || !tokens)) {
    const before = uncounted.get(document);
    try {
      document.tokens = await countTokens(document.text, app.model.max_model_len);
      uncounted.delete(document);
    } catch (error) {
      if (error.wantsKey) throw error;
      document.tokens = 0;
      uncounted.set(document, tell(error)); // the others are counted all the same
    }
    isNews ||= document.tokens > 0 || uncounted.get(document) !== before;
  }
  if (isNews) changed();
}

export function addDocument(name, text, tokens = 0) {
  app.conversation.pending.push({ id: newId(), name, text, tokens });
  store.save(app.conversation);
  changed();
}

function begun(file) {
  const abort = new AbortController();
  const item = documentItem(file.name, "being read…", () => {
    abort.abort();
    uploads.askLater = false;
    item.remove();
  });
  $("pending").append(item);
  uploads.aborts.add(abort);
  uploads.running++;
  changed();
  return { file, abort, item };
}

async function read({ file, abort, item }) {
  const isUnwanted = () => !item.isConnected; // removed, by itself or by a new conversation
  try {
    if (isUnwanted()) return;
    const text = await api.textOf(file, abort.signal);
    const limit = app.model?.max_model_len;
    const tokens = limit ? await countTokens(text, limit, abort.signal) : 0;
    if (isUnwanted()) return;
    item.remove();
    announce(`${file.name} is added`);
    addDocument(file.name, text, tokens);
  } catch (error) {
    if (error.name === "AbortError") return;
    const words = tell(error);
    const failed = documentItem(file.name, words, () => failed.remove(), true);
    if (/UTF-8|encoding/.test(words)) failed.append(encodingChoice(file, failed));
    item.replaceWith(failed);
    announce(`${file.name}: ${words}`);
    uploads.askLater = false; // without it the question may not be meant
  } finally {
    uploads.aborts.delete(abort);
    uploads.running--;
    changed();
    if (uploads.askLater && uploads.running === 0) {
      uploads.askLater = false;
      $("ask").requestSubmit();
    }
  }
}

/** Lets a text be read again in another encoding, by the browser. */
function encodingChoice(file, item) {
  const choice = document.createElement("select");
  choice.ariaLabel = `Encoding of ${file.name}`;
  choice.append(...Object.entries(ENCODINGS).map(([name, words]) => new Option(words, name)));
  const again = button("Read in this encoding", async () => {
    if (app.working) return notice("Documents can be added when the answer is complete.");
    try {
      const text = new TextDecoder(choice.value).decode(await file.arrayBuffer());
      if (!item.isConnected) return; // pressed twice, or removed
      item.remove();
      await addFiles([new File([text], file.name)]);
    } catch (error) {
      notice(`${file.name}: ${error.message}`); // it has changed or is gone
    }
  });
  return row([choice, again]);
}

/** Shows all documents and what they take; `offer` has what can be done if it is too much (`whyNot`). */
export function showDocuments(offer, problem) {
  const { conversation, working } = app;
  const tokens = needed();
  const held = conversation.holds ? [...conversation.base.map(({ id }) => id), ...conversation.kept.documents] : [];
  const isKept = ({ id }) => held.includes(id);
  const items = conversation.base.map((message) => itemOf(message, isKept(message) ? "kept" : "sent"));
  for (const turn of conversation.turns) {
    const state = turn.usage || turn.note ? "read" : working ? "being read" : "sent";
    for (const document of turn.documents) items.push(itemOf(document, isKept(document) ? "kept" : state));
  }
  for (const document of conversation.pending) {
    const state = isKept(document) ? "kept" : "waits for a question";
    const offered = problem ? offers(document, tokens, offer) : [];
    const item = itemOf(document, offered.length ? "too long" : state);
    if (offered.length) item.append(row(offered));
    items.push(item);
  }
  const place = $("pending");
  place.querySelectorAll("[data-ready]").forEach((item) => item.remove());
  place.prepend(...items);
  reader.sync(conversation.documents);
  for (const remove of place.querySelectorAll("[data-ready] :is(button:not(.name), select)")) remove.disabled = working !== null;
  showRoom(tokens, problem);
}

function itemOf(document, state) {
  const remove = () => {
    app.removing(() => app.conversation.remove(document), `${document.name} is removed.`);
    $("files").focus();
  };
  const problem = uncounted.get(document);
  const size = `${documentSize(document)} · ${problem ?? state}`;
  const item = documentItem(document.name, size, remove, Boolean(problem), () => reader.open(null, document));
  item.dataset.ready = state;
  return item;
}

const tokensOf = (document) => document.tokens || roughTokens(document.text);

/** About how many tokens the conversation has. */
function needed() {
  const { conversation } = app;
  const texts = conversation.documents.reduce((sum, { text }) => sum + text.length, 0);
  const counted = conversation.documents.reduce((sum, document) => sum + tokensOf(document), 0);
  return counted + Math.ceil(Math.max(0, conversation.characters - texts) / 4);
}

/** What can be done with a document of a conversation that takes too many `tokens`. */
function offers(document, tokens, { summarise }) {
  const room = roomFor(app.model.max_model_len, app.settings.maxTokens);
  if (!room) return [];
  const own = tokensOf(document);
  const left = room - (tokens - own);
  const parts = Math.ceil(document.tokens / room);
  const found = [];
  if (parts > 1) found.push(button(`Summarise in about ${plural(parts, "part")}`, () => summarise(document)));
  if (left > 1 && left < own) found.push(button(`Use the first ${count(left)} tokens`, () => useBeginning(document, left)));
  return found;
}

function row(buttons) {
  const place = document.createElement("div");
  place.className = "row";
  place.append(...buttons);
  return place;
}

async function useBeginning(document, most) {
  try {
    const all = tokensOf(document);
    const { end, tokens } = await beginning(document.text, 0, most, document.text.length / all);
    if (app.working || !app.conversation.pending.includes(document)) return; // being summarised, removed, or pressed twice
    const name = `${document.name} (first ${count(tokens)} of ${document.tokens ? "" : "about "}${count(all)} tokens)`;
    app.conversation.remove(document);
    addDocument(name, document.text.slice(0, end), tokens);
  } catch (error) {
    notice(tell(error));
  }
}

/** Why a question cannot be asked now, or nothing. */
export function whyNot() {
  const limit = app.model?.max_model_len;
  const tokens = needed();
  const answer = app.settings.maxTokens;
  if (!limit || !tokens || tokens + answer <= limit) return "";
  const remedy = roomFor(limit, answer) ? "Shorten or remove a document." : "Set fewer tokens for an answer (Settings).";
  return `About ${count(tokens)} tokens: with an answer of ${count(answer)} more than the ${count(limit)} that the model holds. ${remedy}`;
}

function showRoom(tokens, problem) {
  const limit = app.model?.max_model_len;
  const fits = tokens && limit ? `About ${count(tokens)} of ${count(limit)} tokens.` : "";
  $("room").textContent = problem || fits;
  $("room").classList.toggle("problem", Boolean(problem));
  $("send").disabled = Boolean(problem);
  $("send").title = problem;
}
