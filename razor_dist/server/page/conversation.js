// Documents, questions and answers, and the messages that are made of them.
//
// What has been sent is sent again word for word before each new question, so that the server has
// its beginning in the caches and reads only what is new. A document that is added later goes with
// the next question for the same reason. What the server keeps as a context is named instead of sent.

export class Conversation {
  /**
   * `base` are messages {id, name, role, text} before the first question, of a context that was kept
   * elsewhere; `kept` is {id, expires_at, documents}: a context, and the ids of those that it holds.
   */
  constructor({ turns = [], pending = [], base = [], kept = null } = {}) {
    Object.assign(this, { turns, pending, base, kept });
  }

  /** A conversation that begins with a context, whose messages are given. */
  static fromContext({ id, expires_at }, { messages, goes_on }) {
    const isOpen = goes_on && messages.at(-1).role === "user";
    const pending = isOpen ? documentsOf(messages.at(-1).content) : [];
    const whole = isOpen ? messages.slice(0, -1) : messages;
    const base = whole.map(({ role, content }) => ({ id: newId(), name: role, role, text: content ?? "" }));
    return new Conversation({ pending, base, kept: { id, expires_at, documents: pending.map((one) => one.id) } });
  }

  /** A copy that later changes leave as it is, to go back to. */
  snapshot() {
    const turns = this.turns.map((turn) => ({ ...turn, documents: [...turn.documents] }));
    return new Conversation({ ...this, turns, pending: [...this.pending], base: [...this.base] });
  }

  /** The documents that the first question begins with. */
  get first() {
    return this.turns[0]?.documents ?? this.pending;
  }

  /** Those of the first question that the context of the conversation does not hold. */
  get notKept() {
    return this.holds ? this.first.slice(this.kept.documents.length) : this.first;
  }

  /** Whether the conversation begins with its context: not if a document was taken out. */
  get holds() {
    return Boolean(this.kept?.documents.every((id, at) => this.first[at]?.id === id));
  }

  /** What of `messages` is to be sent, and the context that stands for the rest. */
  asSent(messages) {
    if (!this.holds) return { messages };
    const [first, ...rest] = messages.slice(this.base.length);
    const inContext = documentsText(this.first.slice(0, this.kept.documents.length)).length;
    return { context: this.kept.id, messages: [{ ...first, content: first.content.slice(inContext) }, ...rest] };
  }

  /** A request's fields that have what is before the first question kept for a time. */
  toKeep(ttl) {
    const { messages, ...context } = this.asSent(new Conversation({ ...this, turns: [], pending: this.first }).messagesAhead());
    const last = messages.pop(); // behind messages of `base`, if no context holds those
    const text = { type: "text", text: last.content, cache_control: { type: "ephemeral", ttl } };
    return { ...context, messages: [...messages, { role: "user", content: [text] }] };
  }

  get documents() {
    return [...this.base, ...this.turns.flatMap((turn) => turn.documents), ...this.pending];
  }

  /** Takes a document out, wherever it is. */
  remove(document) {
    for (const part of [this.base, ...this.turns.map((turn) => turn.documents), this.pending]) {
      const at = part.indexOf(document);
      if (at < 0) continue;
      part.splice(at, 1);
      if (part === this.base) this.kept = null;
    }
  }

  /** Takes a question and its answer out; its documents go to the next question. */
  removeTurn(turn) {
    const at = this.turns.indexOf(turn);
    this.turns.splice(at, 1);
    const next = this.turns[at];
    if (next) next.documents = [...turn.documents, ...next.documents];
    else this.pending = [...turn.documents, ...this.pending];
  }

  /** Takes back a question and all after it; their documents wait again. */
  cut(turn) {
    while (this.turns.includes(turn)) this.takeBack();
    return turn.question;
  }

  /** Begins a turn with a question and all documents that wait for one. */
  ask(question) {
    const turn = { question, documents: this.pending, answer: "", sentences: [], usage: null, note: "" };
    this.pending = [];
    this.turns.push(turn);
    return turn;
  }

  /** Takes the last turn back, which got no answer; its documents wait again. */
  takeBack() {
    const turn = this.turns.pop();
    this.pending = [...turn.documents, ...this.pending];
    return turn.question;
  }

  /** The messages up to and with the last question. */
  messages() {
    const base = this.base.map(({ role, text }) => ({ role, content: text }));
    const own = this.turns.flatMap((turn, i) => {
      const user = { role: "user", content: documentsText(turn.documents) + turn.question };
      const isLast = i === this.turns.length - 1;
      return isLast ? [user] : [user, { role: "assistant", content: turn.together ?? turn.answer }];
    });
    return [...base, ...own];
  }

  /** The messages whose beginning is that of the next question's. */
  messagesAhead() {
    const before = new Conversation({ ...this, turns: [...this.turns, { documents: this.pending, question: "" }] });
    return before.messages();
  }

  /** The id of a message's document, and where in it, at an index of the message's content. */
  documentAt(message, index) {
    const own = message - this.base.length;
    if (own < 0) return { document: this.base[message].id, begin: index };
    let end = 0;
    for (const document of own % 2 ? [] : (this.turns[own / 2]?.documents ?? [])) {
      const begin = end + headOf(document).length;
      end = begin + document.text.length;
      if (index >= begin && index < end) return { document: document.id, begin: index - begin };
      end += behind(document).length;
    }
    return { document: null, begin: index };
  }

  /** Characters of all messages, with the documents that wait for a question. */
  get characters() {
    const asked = this.turns.reduce((sum, turn) => sum + turn.question.length + (turn.together ?? turn.answer).length, 0);
    return this.documents.reduce((sum, one) => sum + headOf(one).length + one.text.length + behind(one).length, asked);
  }
}

const BETWEEN = "\n\n";
// How the page, `razor-dist prefill` and `/v1/messages` send a document.
const HEAD = /(?:^|\n\n)Document ("(?:[^"\\\n]|\\.)*"):\n\n/g;

export const newId = () => crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`;

// A `bare` document is the text of a context in another form, and what has a role is a message of one.
const headOf = ({ name, bare, role }) => (bare || role ? "" : `Document ${JSON.stringify(name)}:\n\n`);
const behind = ({ bare, role }) => (bare || role ? "" : BETWEEN);

function documentsText(documents) {
  return documents.map((document) => headOf(document) + document.text + behind(document)).join("");
}

/** The documents that a message's text has been made of, or the text as one. */
function documentsOf(content) {
  const heads = [...content.matchAll(HEAD)];
  const found = heads.map((head, at) => {
    const end = heads[at + 1]?.index ?? content.length - BETWEEN.length;
    return { id: newId(), name: nameIn(head[1]), text: content.slice(head.index + head[0].length, end), tokens: 0 };
  });
  if (documentsText(found) === content) return found;
  return [{ id: newId(), name: "Kept text", text: content, tokens: 0, bare: true }];
}

/** A name as it was sent: in JSON, or just between the quotation marks. */
export function nameIn(quoted) {
  try {
    return JSON.parse(quoted);
  } catch {
    return quoted.slice(1, -1);
  }
}
