// Documents, questions and answers, and the messages that are made of them.
//
// What has been sent is sent again word for word before each new question, so that the server has
// its beginning in the caches and reads only what is new. A document that is added later goes with
// the next question for the same reason.

export class Conversation {
  constructor({ turns = [], pending = [] } = {}) {
    Object.assign(this, { turns, pending });
  }

  /** A copy that later changes leave as it is, to go back to. */
  snapshot() {
    const turns = this.turns.map((turn) => ({ ...turn, documents: [...turn.documents] }));
    return new Conversation({ turns, pending: [...this.pending] });
  }

  get documents() {
    return [...this.turns.flatMap((turn) => turn.documents), ...this.pending];
  }

  /** Takes a document out, wherever it is. */
  remove(document) {
    for (const part of [...this.turns.map((turn) => turn.documents), this.pending]) {
      const at = part.indexOf(document);
      if (at >= 0) part.splice(at, 1);
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
    return this.turns.flatMap((turn, i) => {
      const user = { role: "user", content: documentsText(turn.documents) + turn.question };
      const isLast = i === this.turns.length - 1;
      return isLast ? [user] : [user, { role: "assistant", content: turn.together ?? turn.answer }];
    });
  }

  /** The messages whose beginning is that of the next question's. */
  messagesAhead() {
    const before = new Conversation({ turns: [...this.turns, { documents: this.pending, question: "" }] });
    return before.messages();
  }

  /** The id of a message's document, and where in it, at an index of the message's content. */
  documentAt(message, index) {
    const documents = message % 2 ? [] : (this.turns[message / 2]?.documents ?? []);
    let end = 0;
    for (const { id, name, text } of documents) {
      const begin = end + documentHead(name).length;
      end = begin + text.length;
      if (index >= begin && index < end) return { document: id, begin: index - begin };
      end += BETWEEN.length;
    }
    return { document: null, begin: index };
  }

  get characters() {
    return this.messagesAhead().reduce((sum, { content }) => sum + content.length, 0);
  }
}

const BETWEEN = "\n\n";

const documentHead = (name) => `Document ${JSON.stringify(name)}:\n\n`;

function documentsText(documents) {
  return documents.map(({ name, text }) => documentHead(name) + text + BETWEEN).join("");
}
