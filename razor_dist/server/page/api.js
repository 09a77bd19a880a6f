// What the page asks the server for, and what can go wrong with it.

const KEY = "razor_dist key";
// Milliseconds after which a server that does not say how it is, or what it serves, counts as gone.
const PATIENCE = 10_000;
// The same of counters and contexts: the server waits up to 8 seconds for its engine to tell them.
const LONG_PATIENCE = 15_000;

/** An answer that is no success; `status` 0 is a server that cannot be reached. */
export class ApiError extends Error {
  constructor(message, { status = 0, code = null, retryAfter = null, sent = "" } = {}) {
    super(message);
    Object.assign(this, { status, code, retryAfter, sent });
  }

  /** The key that is set is missing or wrong; not one that has been replaced meanwhile. */
  get wantsKey() {
    return this.status === 401 && this.sent === key.get();
  }

  get isGone() {
    return this.status === 0;
  }

  /** The server is loading, starting again or ending: worth waiting for. */
  get isNotReady() {
    return this.status === 503;
  }

  get isBusy() {
    return this.status === 429;
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

async function request(path, options = {}) {
  const headers = { ...options.headers };
  const sent = key.get();
  // A header cannot carry others, and the server has none.
  if (!/^[!-~]*$/.test(sent)) throw new ApiError("A key has ASCII characters alone, and no spaces.", { status: 401, sent });
  if (sent) headers.Authorization = `Bearer ${sent}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, credentials: "omit", cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.");
  }
  if (response.ok) return response;
  const { message, code } = (await response.json().catch(() => ({}))).error ?? {};
  const retryAfter = Number(response.headers.get("Retry-After")) || null;
  throw new ApiError(message ?? `The server answered ${response.status}.`, {
    status: response.status,
    code,
    retryAfter,
    sent,
  });
}

/** A signal that aborts after a time, or as another does; browsers of 2023 lack AbortSignal.any. */
function patient(milliseconds, signal = null) {
  const own = new AbortController();
  setTimeout(() => own.abort(new DOMException("", "TimeoutError")), milliseconds);
  signal?.addEventListener("abort", () => own.abort(), { once: true });
  return { signal: own.signal };
}

/** {status, reason}: "ready", or what the server says instead; "gone" without an answer. */
export async function health(signal = null) {
  try {
    const response = await fetch("health", { cache: "no-store", credentials: "omit", ...patient(PATIENCE, signal) });
    return await response.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    return { status: "gone", reason: "" };
  }
}

export async function model() {
  return (await (await request("v1/models", patient(PATIENCE))).json()).data[0];
}

/** {data, limit_bytes}: the contexts that are kept for this key, and how much they may take; 0 for none. */
export async function contexts() {
  return (await request("v1/contexts", patient(LONG_PATIENCE))).json();
}

export async function contextMessages(id) {
  return (await request(`v1/contexts/${id}/messages`)).json();
}

export async function endContext(id) {
  await request(`v1/contexts/${id}`, { method: "DELETE" });
}

/** The counters: of several engines on Ray Serve those of one, which are like the others'. */
export async function stats() {
  const found = await (await request("stats", patient(LONG_PATIENCE))).json();
  return found.engines ? (Object.values(found.engines)[0] ?? {}) : found;
}

/** How many tokens a text has. */
export async function tokens(text, signal) {
  const response = await request("tokenize", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ prompt: text, add_special_tokens: false }),
    signal,
  });
  return (await response.json()).count;
}

/** The text of a file, as the server reads it. */
export async function textOf(file, signal) {
  const name = encodeURIComponent(file.name);
  const response = await request(`documents/text?name=${name}`, {
    method: "POST",
    headers: { "Content-Type": "application/octet-stream" },
    body: file,
    signal,
  });
  return response.text();
}

/**
 * Asks for a chat completion; yields its chunks as they come.
 * Throws ApiError, also for an error in mid-stream; an answer that breaks off has status 0.
 */
export async function* chat(body, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({
      ...body,
      stream: true,
      stream_options: { include_usage: true },
      return_progress: true,
    }),
    signal,
  });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) {
      const { message, code } = chunk.error;
      throw new ApiError(message, { status: 500, code });
    }
    yield chunk;
  }
  throw new ApiError("The connection to the server broke.");
}

/** The data of server-sent events; comments are left out. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      let piece;
      try {
        piece = await reader.read();
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new ApiError("The connection to the server broke.");
      }
      if (piece.done) return;
      const lines = (rest + piece.value).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
