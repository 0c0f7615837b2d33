/* What is wrong with the page that is open, as a list of sentences. */
() => {
  const troubles = [];
  const main = document.querySelector("main");
  const say = (text, node) => troubles.push(`${text}: ${node.textContent.trim().replace(/\s+/g, " ").slice(0, 80)}`);

  /* Text that is not code and not a typeset formula. */
  const walker = document.createTreeWalker(main, NodeFilter.SHOW_TEXT);
  const aside = "pre, code, script, style, mjx-container, mjx-assistive-mml, .viewcode-block, .highlight";
  while (walker.nextNode()) {
    const node = walker.currentNode, text = node.textContent;
    if (node.parentElement.closest(aside)) continue;
    if (/\\[([]|\\begin\{|\$\$|\\(frac|bar|top|mathcal)\b/.test(text)) say("raw TeX", node);
    if (/\{(eq|doc|ref|numref|cite|prf:ref)(:\w+)?\}/.test(text)) say("raw MyST", node);
    if (/\b(eq|def)-\w+-[\w-]+: agrees with .* to \de-\d+/.test(text)) say("a check as a line", node);
  }
  if (/\(\(\d+\.\d+\)\)/.test(main.innerText)) troubles.push(`double brackets: ${main.innerText.match(/.{0,40}\(\(\d+\.\d+\)\)/)[0]}`);
  for (const node of document.querySelectorAll("mjx-merror, [data-mjx-error]")) say("MathJax error", node);
  for (const node of main.querySelectorAll(".math")) {
    if (!node.querySelector("mjx-container")) say("a formula that was not typeset", node);
  }
  for (const node of main.querySelectorAll("img")) {
    if (node.complete && !node.naturalWidth) troubles.push(`broken image: ${node.src}`);
    if (!node.alt) troubles.push(`image without words: ${node.src}`);
  }

  /* A comma alone at the beginning of a line. */
  for (const formula of main.querySelectorAll("span.math")) {
    const next = formula.nextSibling;
    if (next?.nodeType !== Node.TEXT_NODE || !/^[,.;:!?)]/.test(next.textContent)) continue;
    const range = document.createRange();
    range.setStart(next, 0);
    range.setEnd(next, 1);
    const mark = range.getBoundingClientRect();
    if (mark.width && mark.top > formula.getBoundingClientRect().bottom - 2) say("a mark alone on a line", formula.parentElement);
  }

  /* Headings: one title, no level left out, each smaller than the one above it. */
  const headings = [...main.querySelectorAll("article h1, article h2, article h3, article h4")].filter((node) => node.offsetWidth);
  const size = {};
  headings.forEach((node, i) => {
    const level = Number(node.tagName[1]);
    size[level] = parseFloat(getComputedStyle(node).fontSize);
    if (i && level > Number(headings[i - 1].tagName[1]) + 1) say("a heading that leaves out a level", node);
  });
  for (const level of [2, 3, 4]) {
    if (size[level] >= size[level - 1]) troubles.push(`h${level} (${size[level]}) is no smaller than h${level - 1} (${size[level - 1]})`);
  }
  if (headings.filter((node) => node.tagName === "H1").length !== 1) troubles.push("not one title");

  /* A link to a neighbour, whose frame hides what is too wide, and on a desktop a wide table. */
  const frames = ".prev-next-area a" + (innerWidth > 1000 ? ", .pst-scrollable-table-container" : "");
  for (const node of document.querySelectorAll(frames)) {
    if (node.scrollWidth > node.clientWidth + 1) say(`${node.scrollWidth - node.clientWidth} px cut off`, node);
  }

  const over = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  if (over > 0) {
    const wide = [...main.querySelectorAll("*")].filter((node) => node.getBoundingClientRect().right > innerWidth + 1 && !node.closest("pre, mjx-container, .math, .table-wrapper, .pst-scrollable-table-container"));
    troubles.push(`${over} px wider than the screen: ${wide.slice(0, 3).map((node) => `${node.tagName}.${node.className} ${node.textContent.trim().slice(0, 40)}`).join(" | ")}`);
  }
  return troubles;
}
