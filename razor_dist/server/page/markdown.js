// Answers in Markdown as elements, without HTML on the way: the parser gives a tree of places in the
// text, so a passage of the raw text is found again in what is shown, and nothing has to be sanitised.

import { Autolink, Strikethrough, Table, commonmark } from "./vendor/lezer-markdown.min.js";

const parser = commonmark.configure([Table, Strikethrough, Autolink]);

const BLOCKS = {
  Blockquote: "blockquote",
  BulletList: "ul",
  ListItem: "li",
  TableHeader: "tr",
  TableRow: "tr",
};
const INLINE = {
  Paragraph: "p",
  TableCell: "td",
  Emphasis: "em",
  StrongEmphasis: "strong",
  Strikethrough: "del",
};
const HIDDEN = /^(Header|Quote|List|Link|Emphasis|Code|Strikethrough)Mark$|^(CodeInfo|TableDelimiter|LinkTitle|LinkLabel)$/;
const SAFE_LINK = /^(https?:|mailto:)/i;
// Blocks or emphases within each other; what is deeper is shown as it is written. The browser has an end as well.
const DEEPEST = 32;
const ENTITIES = { "&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&nbsp;": "\u00a0" };

/** The blocks of a text: {from, to, name} of each, to tell which have changed. */
export function blocksOf(text) {
  return childrenOf(parser.parse(text).topNode);
}

/**
 * The element of a block. `marks` are ranges {from, to, make} of the text, in order; `make(first)`
 * gives the element for a piece of one, of which emphasis and lines can make several.
 */
export function blockElement(text, block, marks = []) {
  return new Renderer(text, marks).block(block);
}

/** A function that finds the piece of code, {name, from, to}, that a place in a text is in or ends. */
export function codeFinder(text) {
  const tree = parser.parse(text);
  return (at) => {
    let node = tree.resolveInner(at, -1);
    while (node && !/^(InlineCode|FencedCode|CodeBlock)$/.test(node.name)) node = node.parent;
    return node;
  };
}

function childrenOf(node) {
  const children = [];
  for (let child = node.firstChild; child; child = child.nextSibling) children.push(child);
  return children;
}

function element(name, ...children) {
  const made = document.createElement(name);
  made.append(...children);
  return made;
}

class Renderer {
  constructor(text, marks) {
    Object.assign(this, { text, marks, begun: new Set(), depth: 0 });
  }

  block(node) {
    if (node.name in BLOCKS) return this.blocksIn(element(BLOCKS[node.name]), node);
    if (node.name === "OrderedList") {
      const list = element("ol");
      list.start = parseInt(this.text.slice(node.from), 10);
      return this.blocksIn(list, node);
    }
    // One level below the question, whatever the answer calls it: a page has one outline.
    if (/Heading/.test(node.name)) return this.inline(element("h4"), node);
    if (/^(FencedCode|CodeBlock)$/.test(node.name)) return this.code(node);
    if (node.name === "Table") return this.table(node);
    if (node.name === "HorizontalRule") return element("hr");
    if (node.name in INLINE) return this.inline(element(INLINE[node.name]), node);
    return this.put(element("p"), node.from, node.to); // HTML is shown as it is written
  }

  blocksIn(place, node) {
    this.depth++;
    for (const child of childrenOf(node)) {
      if (HIDDEN.test(child.name)) continue;
      place.append(this.depth > DEEPEST ? this.put(element("p"), child.from, child.to) : this.block(child));
    }
    this.depth--;
    return place;
  }

  code(node) {
    const code = element("code");
    for (const child of childrenOf(node)) if (child.name === "CodeText") this.put(code, child.from, child.to);
    return element("pre", code);
  }

  table(node) {
    const rows = childrenOf(node).filter(({ name }) => name !== "TableDelimiter");
    const table = element("table", ...rows.map((row) => this.row(row)));
    const frame = element("div", table); // a wide table is scrolled, by keyboard as well
    Object.assign(frame, { className: "table", tabIndex: 0, role: "region", ariaLabel: "Table" });
    return frame;
  }

  row(node) {
    const row = element("tr");
    let delimiters = 0; // two without a cell between them have an empty one
    const cell = () => row.appendChild(element(node.name === "TableHeader" ? "th" : "td"));
    for (const child of childrenOf(node)) {
      if (child.name === "TableDelimiter") {
        if (++delimiters > 1) cell();
      } else {
        this.inline(cell(), child);
        delimiters = 0;
      }
    }
    return row;
  }

  /** Puts the text of a node into a place, with the elements of what is in it. */
  inline(place, node) {
    let done = node.from;
    if (/ATXHeading/.test(node.name)) done += /^#+[ \t]*/.exec(this.text.slice(node.from, node.to))[0].length;
    for (const child of childrenOf(node)) {
      if (child.to <= done) continue;
      this.put(place, done, child.from);
      if (!HIDDEN.test(child.name)) this.inlineNode(place, child);
      done = child.to;
    }
    return this.put(place, done, node.to);
  }

  inlineNode(place, node) {
    const { from, to } = node;
    const raw = this.text.slice(from, to);
    this.depth++;
    if (this.depth > DEEPEST) this.put(place, from, to);
    else if (node.name in INLINE) place.append(this.inline(element(INLINE[node.name]), node));
    else if (node.name === "InlineCode") place.append(this.inline(element("code"), node));
    else if (node.name === "HardBreak") place.append(element("br"));
    else if (node.name === "Escape") this.put(place, from + 1, to);
    else if (node.name === "Entity") this.put(place, from, to, ENTITIES[raw] ?? raw);
    else if (/^(Link|Image)$/.test(node.name)) this.link(place, node);
    else if (/^(URL|Autolink)$/.test(node.name)) this.address(place, node, raw);
    else this.put(place, from, to);
    this.depth--;
  }

  /** A link or picture with an address; pictures are not loaded, so theirs are links too. */
  link(place, node) {
    const children = childrenOf(node);
    const [open, close] = children.filter(({ name }) => name === "LinkMark");
    const url = children.find(({ name }) => name === "URL");
    const made = url && close && anchor(this.text.slice(url.from, url.to));
    if (!made) return this.put(place, node.from, node.to);
    const inside = { from: open.to, to: close.from, name: "Link" };
    let done = inside.from;
    for (const child of children) {
      if (child.from < inside.from || child.to > inside.to) continue;
      this.put(made, done, child.from);
      this.inlineNode(made, child);
      done = child.to;
    }
    place.append(this.put(made, done, inside.to));
    return place;
  }

  address(place, { from, to }, raw) {
    const cut = raw.startsWith("<") ? 1 : 0;
    const url = raw.slice(cut, raw.length - cut);
    const made = anchor(/^www\./i.test(url) ? `https://${url}` : url);
    if (made) place.append(this.put(made, from + cut, to - cut));
    else this.put(place, from, to);
  }

  /** Puts the text from..to into a place, in pieces where marks begin and end. */
  put(place, from, to, shown = null) {
    for (let at = from; at < to; ) {
      const mark = this.marks.find((one) => one.from <= at && at < one.to);
      const next = this.marks.find((one) => one.from > at)?.from ?? to;
      const end = shown === null ? Math.min(to, mark?.to ?? next) : to;
      const words = shown ?? this.text.slice(at, end);
      at = end;
      // Within a link the link is what is chosen; white space alone is nothing to choose.
      if (!mark || place.closest("a") || !words.trim()) {
        place.append(words);
        continue;
      }
      const piece = mark.make(!this.begun.has(mark));
      this.begun.add(mark);
      piece.append(words);
      place.append(piece);
    }
    return place;
  }
}

function anchor(url) {
  if (!SAFE_LINK.test(url)) return null;
  const link = element("a");
  Object.assign(link, { href: url, target: "_blank", rel: "noopener noreferrer nofollow", title: url });
  return link;
}
