// One request at a time, asked again while the server is busy or not ready.

import * as api from "./api.js";
import { duration } from "./format.js";

// Seconds between looks at a server that is not ready.
const LOOK = 2;
// Tries after which a server that cannot be reached, or does not answer, is given up.
const GONE = 30;

const WORDS = {
  loading: "The server is loading the model",
  restarting: "The server is starting its ranks again",
  draining: "The server is shutting down",
  closed: "The server is shutting down",
  gone: "The server cannot be reached",
  failed: "The server's engine has failed",
  ready: "Ready",
};

export function stateWords({ status, reason }) {
  const words = WORDS[status] ?? `The server is ${status}`;
  return status === "failed" && reason ? `${words}: ${reason}` : words;
}

function sleep(seconds, signal) {
  return new Promise((resolve, reject) => {
    if (signal.aborted) return reject(new DOMException("", "AbortError"));
    const timer = setTimeout(resolve, 1000 * seconds);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(new DOMException("", "AbortError"));
    });
  });
}

/** Waits until the server is ready, for one look at least; throws if it will not be. */
async function untilReady(signal, say) {
  for (let tries = 1; ; tries++) {
    const state = await api.health(signal);
    if (state.status === "failed" || (state.status === "gone" && tries > GONE)) {
      throw new api.ApiError(stateWords(state));
    }
    const isReady = state.status === "ready";
    say(isReady ? "The server did not answer. Asking again." : `${stateWords(state)}. Your question is kept and asked when it is ready.`);
    await sleep(LOOK, signal);
    if (isReady) return;
  }
}

/**
 * Yields the chunks of an answer to what `request` returns. While no text has come, a server that is
 * busy, not ready or gone is asked again, and once more if its ranks end; `say` gets a sentence about
 * each wait. So it is if its context is gone and `withoutContext` returns that the request can be made
 * without.
 */
export async function* ask(request, signal, say, withoutContext) {
  let begun = false;
  let lost = 0;
  let ended = 0; // its own length may be what ends them
  while (true) {
    try {
      for await (const chunk of api.chat(await request(), signal)) {
        begun ||= Boolean(chunk.choices?.[0]?.delta?.content);
        yield chunk;
      }
      return;
    } catch (error) {
      if (begun || !(error instanceof api.ApiError)) throw error;
      if (error.isBusy) await countdown(error, signal, say);
      else if ((error.isNotReady || error.isGone) && ++lost <= GONE) await untilReady(signal, say);
      else if (error.code === "engine_error" && ++ended <= 1) await untilReady(signal, say);
      else if (error.code !== "context_not_found" || !withoutContext()) throw error;
    }
  }
}

/** Waits as long as a refusal says, with its reason: a full queue, kept documents, a key's limit. */
async function countdown({ message, retryAfter }, signal, say) {
  for (let left = retryAfter ?? 5; left > 0; left--) {
    say(`The server is busy (${message}). Asking again in ${duration(left)}.`);
    await sleep(1, signal);
  }
  say("Asking again.");
}
