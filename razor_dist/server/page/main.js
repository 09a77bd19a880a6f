// The page: what its buttons do.

import * as api from "./api.js";
import { Conversation } from "./conversation.js";
import { count, roughTokens } from "./format.js";
import { Gauge } from "./gauge.js";
import { Reading } from "./reading.js";
import { ask, stateWords } from "./session.js";
import { locate } from "./sources.js";
import * as store from "./store.js";
import { $, TurnView, documentItem, documentSize, download, usageWords } from "./views.js";

// Milliseconds between looks at the server, and between savings of an answer that grows.
const LOOK = 4000;
const SAVE = 2000;
const SETTINGS = "razor_dist settings";
// Passages shown for an answer.
const SOURCES = 3;

let conversation = new Conversation();
let model = null;
let tellsSources = false; // the server's heads tell where answers come from
let working = null; // the AbortController of the running request
let uploads = 0;
let asksLater = false; // the question waits for a document that is being added
const gauge = new Gauge($("gauge"));
const settings = { maxTokens: 512, temperature: "", ...JSON.parse(sessionStorage.getItem(SETTINGS) ?? "{}") };

function announce(words) {
  $("announce").textContent = words;
}

function notice(words) {
  $("notice").textContent = words;
  $("notice").hidden = !words;
}

// Documents

async function addFiles(files) {
  for (const file of files) await addFile(file);
}

async function addFile(file) {
  const abort = new AbortController();
  const mine = conversation;
  const item = documentItem(file.name, "being read…", () => {
    abort.abort();
    asksLater = false;
    item.remove();
  });
  $("pending").append(item);
  uploads++;
  showState();
  try {
    const text = await api.textOf(file, abort.signal);
    item.remove();
    if (abort.signal.aborted || mine !== conversation) return;
    conversation.pending.push({ name: file.name, text });
    announce(`${file.name} is added`);
    store.save(conversation);
  } catch (error) {
    if (error.name === "AbortError") return;
    const words = tell(error);
    item.replaceWith(documentItem(file.name, words, (event) => event.target.closest("li").remove(), true));
    announce(`${file.name}: ${words}`);
    asksLater = false; // without it the question may not be meant
  } finally {
    uploads--;
    showPending();
    if (asksLater && uploads === 0) $("ask").requestSubmit();
  }
}

function showPending() {
  $("ahead-note").textContent = "";
  const list = $("pending");
  list.querySelectorAll("[data-ready]").forEach((item) => item.remove());
  const items = conversation.pending.map((document) => {
    const item = documentItem(document.name, documentSize(document), () => {
      conversation.pending.splice(conversation.pending.indexOf(document), 1);
      store.save(conversation);
      showPending();
      $("files").focus();
    });
    item.dataset.ready = "";
    return item;
  });
  list.prepend(...items);
  showState();
}

// Questions

/** Says what went wrong, and opens the settings if the key is wanted. */
function tell(error) {
  if (!(error instanceof api.ApiError)) {
    console.error(error);
    return `Something went wrong in this page: ${error.message}`;
  }
  if (error.wantsKey) openSettings("This server wants an API key that it knows.");
  return error.message;
}

async function body(messages, maxTokens) {
  await knowModel();
  const temperature = settings.temperature === "" ? {} : { temperature: Number(settings.temperature) };
  const sources = tellsSources ? { return_sources: SOURCES } : {};
  return { model: model.id, messages, max_tokens: maxTokens, ...temperature, ...sources };
}

/** Runs a request; `use` gets its chunks. Returns the error it ended with, if any. */
async function run(request, reading, use) {
  working = new AbortController();
  notice("");
  showState();
  let told = "";
  const say = (words) => {
    reading.say(words);
    const sentence = words.replace(/\d+/g, "");
    if (sentence !== told) announce(words); // not each second of a countdown
    told = sentence;
  };
  try {
    for await (const chunk of ask(request, working.signal, say)) {
      if (chunk.prompt_progress) reading.update(chunk.prompt_progress);
      use(chunk);
    }
    return null;
  } catch (error) {
    return error;
  } finally {
    working = null;
    reading.end();
    look();
  }
}

async function send(question) {
  const turn = conversation.ask(question);
  const view = viewOf(turn);
  $("turns").append(view.element);
  showPending();
  store.save(conversation);
  toEnd();
  const reading = new Reading(view.reading, announce);
  let saved = performance.now();
  let finish = null;
  const request = () => body(conversation.messages(), settings.maxTokens);
  const error = await run(request, reading, (chunk) => {
    if (chunk.usage) turn.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    finish = choice?.finish_reason ?? finish;
    if (choice?.sources) {
      turn.sources = locate(choice.sources, conversation);
      turn.grounded = choice.grounded;
    }
    for (const { start, end, sources } of choice?.sentences ?? []) {
      turn.sentences.push({ start, end, sources: locate(sources, conversation) });
    }
    const text = choice?.delta?.content;
    if (!text) return;
    reading.end();
    follow(() => view.append(text));
    if (performance.now() - saved > SAVE) {
      saved = performance.now();
      turn.note = "Interrupted.";
      store.save(conversation);
    }
  });
  const stopped = error?.name === "AbortError";
  turn.note = stopped ? "Stopped." : error ? tell(error) : "";
  if (finish === "length") turn.note = `Cut off after ${count(settings.maxTokens)} tokens (Settings).`;
  if (error && !turn.answer) {
    takeBack(view, stopped ? "Stopped before an answer came." : turn.note);
  } else {
    follow(() => view.show());
    announce(stopped ? "Stopped." : error ? turn.note : "The answer is complete.");
  }
  store.save(conversation);
  showState();
}

/** A turn as an element; its sources may be documents of earlier ones. */
function viewOf(turn) {
  const mine = conversation;
  return new TurnView(turn, (index) => mine.turns[index]?.documents ?? []);
}

/** Puts a question without an answer back where it was written. */
function takeBack(view, why) {
  const question = conversation.takeBack();
  view.element.remove();
  $("question").value ||= question;
  notice(why);
  showPending();
}

/** Reads what waits before there is a question, so that its answer comes sooner. */
async function readAhead() {
  const place = document.querySelector("#ahead .reading");
  const reading = new Reading(place, announce);
  let usage = null;
  const request = () => body(conversation.messagesAhead(), 1);
  const error = await run(request, reading, (chunk) => (usage = chunk.usage ?? usage));
  if (error && error.name !== "AbortError") notice(tell(error));
  if (!error && usage) {
    const { prompt_tokens, prompt_tokens_details } = usage;
    announce("The documents are read.");
    $("ahead-note").textContent = `Read. ${usageWords({ prompt_tokens, prompt_tokens_details })}`;
  }
}

/** Keeps the end in view while it grows, unless the reader has scrolled away from it. */
function follow(change) {
  const atEnd = $("turns").getBoundingClientRect().bottom < innerHeight;
  change();
  if (atEnd) toEnd();
}

function toEnd() {
  $("turns").scrollIntoView({ block: "end" });
}

// The server's state

async function knowModel() {
  // Until it is loaded the server does not tell how much it holds.
  if (!model?.max_model_len) model = await api.model();
}

/** Shows the server's state and, if it is asked for its counters as well, what they tell. */
async function look(counters = true) {
  const state = await api.health();
  $("state").dataset.state = state.status;
  const words = stateWords(state);
  if ($("state").textContent !== words) $("state").textContent = words;
  if (state.status !== "ready" || !counters) return;
  try {
    await knowModel();
    const found = await api.stats();
    gauge.show(found);
    $("ahead").dataset.known = "prefix_cache" in found;
    tellsSources = found.source_heads > 0;
  } catch (error) {
    if (error.wantsKey && !keyAsked) {
      keyAsked = true;
      tell(error);
    }
  }
  showState();
}

let keyAsked = false; // once: who has closed the settings has seen them

function showState() {
  const busy = working !== null;
  $("send").hidden = busy;
  $("stop").hidden = !busy;
  $("new").disabled = $("files").disabled = busy;
  $("empty").hidden = conversation.turns.length > 0;
  $("export").disabled = busy || conversation.turns.length === 0;
  $("model").textContent = model ? model.id : "";
  const waits = conversation.pending.length > 0;
  $("ahead").hidden = !(waits && $("ahead").dataset.known === "true");
  $("read-ahead").hidden = busy;
  for (const button of document.querySelectorAll("#pending .remove")) button.disabled = busy;
  showRoom();
}

function showRoom() {
  const limit = model?.max_model_len;
  const tokens = roughTokens({ length: conversation.characters });
  if (!tokens || !limit) {
    $("room").textContent = "";
  } else if (tokens > limit) {
    $("room").textContent = `About ${count(tokens)} tokens: more than the ${count(limit)} that the model holds. Remove some.`;
  } else {
    $("room").textContent = `About ${count(tokens)} of ${count(limit)} tokens.`;
  }
}

// Settings

function openSettings(problem = "") {
  $("key-problem").textContent = problem;
  $("key-problem").hidden = !problem;
  if ($("settings").open) return; // what is being typed stays
  $("key").value = api.key.get();
  $("max-tokens").value = settings.maxTokens;
  $("temperature").value = settings.temperature;
  $("settings").showModal();
  $("key").focus();
}

function saveSettings() {
  api.key.set($("key").value.trim());
  settings.maxTokens = Math.max(1, Math.round(Number($("max-tokens").value)) || 512);
  settings.temperature = $("temperature").value;
  sessionStorage.setItem(SETTINGS, JSON.stringify(settings));
  keyAsked = false;
  $("settings").close();
  look();
}

// What happens when

function listen(id, event, action) {
  $(id).addEventListener(event, action);
}

listen("files", "change", async (event) => {
  const files = [...event.target.files];
  event.target.value = ""; // the same file may be chosen again
  await addFiles(files);
});
listen("ask", "submit", (event) => {
  event.preventDefault();
  const question = $("question").value.trim();
  if (!question || working) return;
  asksLater = uploads > 0;
  if (asksLater) return notice("Your question is asked when the document is there.");
  $("question").value = "";
  send(question);
});
listen("question", "keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("ask").requestSubmit();
});
listen("stop", "click", () => working?.abort());
listen("read-ahead", "click", readAhead);
listen("new", "click", () => {
  conversation = new Conversation();
  $("turns").replaceChildren();
  $("pending").replaceChildren();
  notice("");
  store.save(conversation);
  showPending();
  $("files").focus();
});
listen("export", "click", () => download("conversation.md", conversation.toMarkdown(model?.id ?? "a model")));
listen("open-settings", "click", () => openSettings());
listen("save-settings", "click", saveSettings);
listen("close-settings", "click", () => $("settings").close());
listen("close-reader", "click", () => $("reader").close());
listen("settings", "keydown", (event) => {
  if (event.key === "Enter" && event.target.matches("input")) saveSettings();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) working?.abort();
});
document.addEventListener("dragover", (event) => {
  event.preventDefault();
  document.body.classList.add("dragging");
});
document.addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) document.body.classList.remove("dragging");
});
document.addEventListener("drop", (event) => {
  event.preventDefault();
  document.body.classList.remove("dragging");
  if (working) notice("Documents can be added when the answer is complete.");
  else addFiles([...event.dataTransfer.files]);
});
document.addEventListener("visibilitychange", () => document.hidden || look());

async function begin() {
  const saved = await store.load();
  if (saved) {
    conversation = new Conversation(saved);
    const last = conversation.turns.at(-1);
    if (last && !last.answer) {
      $("question").value = conversation.takeBack();
      notice("The page was loaded again before an answer came.");
    }
  }
  $("turns").replaceChildren(...conversation.turns.map((turn) => viewOf(turn).element));
  showPending();
  document.documentElement.dataset.loaded = "";
  for (let looks = 0; ; looks++) {
    // The counters cost all ranks a moment.
    if (!document.hidden) await look(working !== null || looks % 5 === 0);
    await new Promise((resolve) => setTimeout(resolve, LOOK));
  }
}

begin();
