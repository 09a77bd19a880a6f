// The page: what its buttons do.

import * as api from "./api.js";
import { keep, knowModel, readAhead, send, summarise, viewOf } from "./asking.js";
import { hide as hideCard } from "./card.js";
import { kept, showContexts } from "./contexts.js";
import { Conversation } from "./conversation.js";
import { addDocument, addFiles, countAll, endUploads, showDocuments, uploads, whyNot } from "./documents.js";
import { $, button, download } from "./dom.js";
import { toMarkdown } from "./export.js";
import { chosenFolder, dropped } from "./files.js";
import { Gauge } from "./gauge.js";
import { reader } from "./reader.js";
import { QUESTIONS, SAMPLE } from "./sample.js";
import { stateWords } from "./session.js";
import { app, changed, saveSettings } from "./state.js";
import * as store from "./store.js";
import { notice, tell } from "./words.js";

// Milliseconds between looks at the server.
const LOOK = 4000;
const SCROLLED = "razor_dist scrolled";

const gauge = new Gauge($("gauge"), $("gauge-summary"), $("gauge-from"));

// Changing what has been said

/** Shows another conversation instead. */
app.restore = (conversation) => {
  app.conversation = conversation;
  const views = conversation.turns.map(viewOf);
  $("turns").replaceChildren(...views.map(({ element }) => element));
  store.save(conversation);
  changed();
  if (views.length) views.at(-1).light();
  else reader.light([]);
};

/** Shows what the conversation was `before`, with the documents that were added since. */
app.goBack = (before) => {
  const had = before.documents;
  before.pending.push(...app.conversation.pending.filter((one) => !had.includes(one)));
  app.restore(before);
};

/** Changes the conversation and says so, with a way back. */
app.removing = (change, words) => {
  if (app.working) return;
  const before = app.conversation.snapshot();
  change();
  app.restore(app.conversation);
  notice(words, () => {
    notice("");
    app.goBack(before);
    $("question").focus();
  });
};

app.removeTurn = (turn) => {
  app.removing(() => app.conversation.removeTurn(turn), "A question and its answer are removed.");
  $("question").focus();
};

app.edit = (turn) => {
  app.removing(() => ($("question").value = app.conversation.cut(turn)), "Change the question and ask again; what followed it is removed.");
  $("question").focus();
};

// The server's state

/** Shows the server's state and, if it is asked for its counters as well, what they tell. */
async function look(counters = true) {
  const state = await api.health();
  $("state").dataset.state = state.status;
  const words = stateWords(state);
  if ($("state").textContent !== words) $("state").textContent = words;
  wasAway ||= state.status !== "ready";
  if (state.status !== "ready" || !counters) return;
  counting++;
  showCounters().finally(() => counting--); // not awaited: the state is looked at meanwhile
}

async function showCounters() {
  try {
    const before = app.model;
    if (wasAway) app.model = await api.model(); // it may have come back with another
    await knowModel();
    wasAway = false;
    const isNew = before?.id !== app.model.id || before?.max_model_len !== app.model.max_model_len;
    if (isNew) changed();
    await countAll(isNew);
    const found = await api.stats();
    gauge.show(found);
    const readsAhead = String("prefix_cache" in found);
    if ($("ahead").dataset.known !== readsAhead) {
      $("ahead").dataset.known = readsAhead;
      changed();
    }
    app.tellsSources = found.source_heads > 0;
    await showContexts();
  } catch (error) {
    if (error.wantsKey && !keyAsked) {
      keyAsked = true;
      tell(error);
    }
  }
}

let counting = 0; // times that the counters are being asked for
let wasAway = false;
let keyAsked = false; // once: who has closed the settings has seen them
let wasBusy = false;

function show() {
  const { conversation, model } = app;
  const busy = app.working !== null;
  const problem = whyNot();
  $("send").hidden = busy;
  $("stop").hidden = !busy;
  $("new").disabled = $("files").disabled = $("open-folder").disabled = busy;
  const isNew = conversation.turns.length === 0;
  const hasDocuments = conversation.documents.length > 0 || uploads.running > 0;
  $("empty").hidden = !isNew || hasDocuments;
  $("hint").hidden = !isNew || !hasDocuments;
  $("hint").textContent = problem ? "Too much to ask about at once: what can be done stands above." : "Ask something about them: answers stand here.";
  document.body.classList.toggle("blank", isNew && !hasDocuments);
  $("export").disabled = busy || conversation.turns.length === 0;
  $("model").textContent = model ? model.id : "";
  $("ahead").hidden = !(conversation.pending.length && $("ahead").dataset.known === "true" && !problem);
  const canKeep = kept.isPossible && conversation.notKept.length > 0 && !problem;
  if (canKeep) $("ahead").hidden = false;
  $("keep-row").hidden = busy || !canKeep;
  $("read-ahead").hidden = busy || !conversation.pending.length || conversation.holds;
  $("keep").disabled = $("read-ahead").disabled = uploads.running > 0;
  for (const one of document.querySelectorAll("#contexts button")) one.disabled = busy;
  $("turns").classList.toggle("busy", busy);
  if (!busy && !wasBusy) $("ahead-note").textContent = "";
  showDocuments({ summarise }, problem);
  if (wasBusy && !busy) look();
  wasBusy = busy;
}

// Settings

app.openSettings = (problem = "") => {
  $("key-problem").textContent = problem;
  $("key-problem").hidden = !problem;
  if (problem) $("key-row").hidden = false;
  if ($("settings").open) return; // what is being typed stays
  $("key-row").hidden = !problem && !api.key.get();
  $("key").value = api.key.get();
  $("max-tokens").value = app.settings.maxTokens;
  $("temperature").value = app.settings.temperature;
  $("settings").showModal();
  $(problem ? "key" : "max-tokens").focus();
};

function takeSettings() {
  api.key.set($("key").value.trim());
  app.settings.maxTokens = Math.max(1, Math.round(Number($("max-tokens").value)) || 512);
  app.settings.temperature = $("temperature").value;
  saveSettings();
  keyAsked = false;
  $("settings").close();
  changed();
  look();
}

// What happens when

function addFolder({ files, left }) {
  notice(left);
  return addFiles(files);
}

function listen(id, event, action) {
  $(id).addEventListener(event, action);
}

document.addEventListener("changed", show);
listen("files", "change", async (event) => {
  const files = [...event.target.files];
  event.target.value = ""; // the same file may be chosen again
  await addFiles(files);
});
listen("open-folder", "click", () => $("folder").click());
listen("folder", "change", async (event) => {
  const found = chosenFolder(event.target.files);
  event.target.value = "";
  await addFolder(found);
});
listen("ask", "submit", (event) => {
  event.preventDefault();
  const question = $("question").value.trim();
  if (!question || app.working) return;
  if (whyNot()) return notice(whyNot());
  uploads.askLater = uploads.running > 0;
  if (uploads.askLater) return notice("Your question is asked when the document is there.");
  $("question").value = "";
  send(question);
});
listen("question", "keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("ask").requestSubmit();
});
listen("stop", "click", () => app.working?.abort());
listen("read-ahead", "click", readAhead);
listen("keep", "click", async () => {
  await keep($("keep-for").value);
  await showContexts().catch((error) => notice(tell(error)));
});
listen("new", "click", () => {
  endUploads();
  $("pending").replaceChildren();
  const isEmpty = !app.conversation.turns.length && !app.conversation.documents.length;
  if (!isEmpty) app.removing(() => (app.conversation = new Conversation()), "A new conversation.");
  else if (!$("notice").querySelector("button")) notice(""); // pressed twice, the first can be undone
  changed();
  $("files").focus();
});
listen("export", "click", () => download("conversation.md", toMarkdown(app.conversation, app.model?.id ?? "a model")));
listen("open-settings", "click", () => app.openSettings());
listen("save-settings", "click", takeSettings);
listen("close-settings", "click", () => $("settings").close());
listen("settings", "keydown", (event) => {
  if (event.key !== "Enter" || !event.target.matches("input")) return;
  event.preventDefault(); // the button that opened them has the focus then, and would open them again
  takeSettings();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !event.isComposing && !hideCard() && !document.querySelector("dialog:modal")) app.working?.abort();
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
  if (app.working) notice("Documents can be added when the answer is complete.");
  else dropped(event.dataTransfer).then(addFolder).catch((error) => notice(tell(error)));
});
document.addEventListener("visibilitychange", () => {
  if (document.hidden) return;
  wasAway = true; // the server may have another model by now: a hidden page does not ask
  look();
});
addEventListener("pagehide", () => sessionStorage.setItem(SCROLLED, String(scrollY)));

async function begin() {
  history.scrollRestoration = "manual"; // the browser's comes before the conversation is there
  document.querySelector("#sample blockquote").textContent = SAMPLE.beginning;
  $("samples").append(
    ...QUESTIONS.map((question) =>
      button(question, () => {
        addDocument(SAMPLE.name, SAMPLE.text);
        send(question);
      }),
    ),
  );
  const saved = await store.load();
  if (saved) {
    app.conversation = new Conversation(saved);
    const last = app.conversation.turns.at(-1);
    if (last && !last.answer && !last.usage) {
      const question = app.conversation.takeBack();
      $("question").value = last.summary ? "" : question; // the document's button asks for a summary
      notice("The page was loaded again before an answer came.");
    }
  }
  app.restore(app.conversation);
  scrollTo(0, Number(sessionStorage.getItem(SCROLLED) ?? 0));
  document.documentElement.dataset.loaded = "";
  for (let looks = 0; ; looks++) {
    // The counters cost all ranks a moment.
    if (!document.hidden) await look(!counting && (app.working !== null || looks % 5 === 0));
    await new Promise((resolve) => setTimeout(resolve, LOOK));
  }
}

begin();
