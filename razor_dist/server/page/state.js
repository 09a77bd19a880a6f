// What the parts of the page share.

import { Conversation } from "./conversation.js";

const SETTINGS = "razor_dist settings";

export const app = {
  conversation: new Conversation(),
  model: null,
  tellsSources: false, // the server's heads tell where answers come from
  working: null, // the AbortController of the running request
  settings: { maxTokens: 512, temperature: "", ...JSON.parse(sessionStorage.getItem(SETTINGS) ?? "{}") },
};

export function saveSettings() {
  sessionStorage.setItem(SETTINGS, JSON.stringify(app.settings));
}

/** Tells the page that what it shows of the state is old. */
export const changed = () => document.dispatchEvent(new Event("changed"));
