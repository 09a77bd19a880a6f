// Documents and turns as elements. What comes from outside becomes text, never markup.

import { count, plural, roughTokens } from "./format.js";
import { answerNodes, sourceItems } from "./sources.js";

export const $ = (id) => document.getElementById(id);

const copyOf = (id) => $(id).content.firstElementChild.cloneNode(true);

export function documentSize({ text }) {
  return `${plural(text.length, "character")}, about ${plural(roughTokens(text), "token")}`;
}

/** An item for a file: `size` tells how it is, `remove` is called by its button. */
export function documentItem(name, size, remove, problem = false) {
  const item = copyOf("document-template");
  item.querySelector(".name").textContent = name;
  const words = item.querySelector(".size");
  words.textContent = size;
  words.classList.toggle("problem", problem);
  const button = item.querySelector(".remove");
  button.setAttribute("aria-label", `Remove ${name}`);
  button.addEventListener("click", remove);
  return item;
}

export class TurnView {
  /** `documentsOf` gives the documents of a turn by its index, for sources. */
  constructor(turn, documentsOf) {
    this.turn = turn;
    this.documentsOf = documentsOf;
    this.element = copyOf("turn-template");
    this.part(".question").textContent = turn.question;
    for (const { name, text } of turn.documents) {
      const item = document.createElement("li");
      const shown = document.createElement("bdi");
      shown.textContent = name;
      item.append(shown, ` · ${documentSize({ text })}`);
      this.part(".documents").append(item);
    }
    this.part(".copy").addEventListener("click", (event) => this.copy(event.currentTarget));
    this.text = document.createTextNode("");
    this.show();
  }

  part(selector) {
    return this.element.querySelector(selector);
  }

  get reading() {
    return this.part(".reading");
  }

  append(text) {
    this.turn.answer += text;
    if (!this.text.isConnected) this.part(".answer").replaceChildren(this.text);
    this.text.appendData(text);
  }

  /** Shows the turn as it is when nothing more comes. */
  show() {
    const { answer, note, usage, sentences = [] } = this.turn;
    this.text.data = answer;
    this.part(".answer").replaceChildren(...(answer ? answerNodes(answer, sentences, this.documentsOf) : []));
    this.part(".note").textContent = note;
    this.part(".note").hidden = !note;
    this.part(".usage").textContent = usage ? usageWords(usage) : "";
    this.part(".copy").hidden = !answer;
    const { sources = [], grounded = null } = this.turn;
    this.part(".sources").hidden = grounded === null;
    this.part(".sources ol").replaceChildren(...sourceItems(sources, this.documentsOf));
    this.part(".sources p").textContent = grounded === null ? "" : groundedWords(grounded, sources);
  }

  async copy(button) {
    await copyText(this.turn.answer);
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 2000);
  }
}

/** What the server's score says; docs/sources.md has the measurement. */
function groundedWords(grounded, sources) {
  if (sources.length) return `Found in what was read (${Math.round(100 * grounded)} %).`;
  return `Hardly found in what was read (${Math.round(100 * grounded)} %): rather the model's own words.`;
}

export function usageWords({ prompt_tokens, completion_tokens, prompt_tokens_details }) {
  const known = prompt_tokens_details?.cached_tokens;
  const news = known === undefined ? "" : `, ${count(prompt_tokens - known)} of them new`;
  const answer = completion_tokens === undefined ? "" : ` · answer ${plural(completion_tokens, "token")}`;
  return `Prompt ${plural(prompt_tokens, "token")}${news}${answer}`;
}

async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Without TLS only pages of this machine have the clipboard.
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

export function download(name, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "text/markdown;charset=utf-8" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
