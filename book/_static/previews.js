/* Hovering over, or moving the focus to, a link to an equation, a proposition, a figure, a check or
   a source shows it. Everything comes from the book itself; where pages cannot be fetched (a book
   opened from a file), links into other pages stay plain links. */

(() => {
  const CARD = "preview-card";
  const SHOWN = [
    "div.math", ".proof", ".exercise", ".admonition", "figure", "div.citation", "ul.checks", "table",
  ].join(", ");
  const pages = new Map();
  let card, timer, shownFor;

  async function pageOf(url) {
    const address = url.origin + url.pathname;
    if (address === location.origin + location.pathname) return document;
    if (!pages.has(address)) {
      const text = fetch(address).then((answer) => {
        if (!answer.ok) throw new Error(answer.status);
        return answer.text();
      });
      pages.set(address, text.then((html) => new DOMParser().parseFromString(html, "text/html")));
    }
    return pages.get(address);
  }

  /* What the anchor stands for: it, or what it stands in front of. */
  function target(page, id) {
    const at = page.getElementById(id);
    if (!at) return null;
    if (at.matches(SHOWN)) return at;
    const next = at.nextElementSibling;
    return at.closest("ul.checks, div.citation, div.proof, figure") || (next?.matches(SHOWN) ? next : null);
  }

  function copy(found, base) {
    const clone = document.importNode(found, true);
    clone.classList.remove("toggle-hidden", "dropdown");
    for (const node of clone.querySelectorAll(".headerlink, button, script")) node.remove();
    for (const node of [clone, ...clone.querySelectorAll("[id]")]) node.removeAttribute("id");
    for (const node of clone.querySelectorAll("[src]")) {
      node.setAttribute("src", new URL(node.getAttribute("src"), base).href);
    }
    /* The page shows typeset formulas, a fetched one TeX. A copy needs no links of its own. */
    for (const node of clone.querySelectorAll("a")) node.replaceWith(...node.childNodes);
    return clone;
  }

  function hide() {
    clearTimeout(timer);
    card?.remove();
    card = shownFor = undefined;
  }

  /* Below the link or above it, wherever there is more room, and no higher than that room. */
  function place(link) {
    const at = link.getBoundingClientRect();
    card.style.maxHeight = "";
    const below = at.bottom + card.offsetHeight + 12 < innerHeight || innerHeight - at.bottom > at.top;
    card.style.maxHeight = `${(below ? innerHeight - at.bottom : at.top) - 12}px`;
    const left = Math.max(8, Math.min(at.left, document.documentElement.clientWidth - card.offsetWidth - 8));
    card.style.left = `${left + scrollX}px`;
    card.style.top = `${scrollY + (below ? at.bottom + 6 : at.top - card.offsetHeight - 6)}px`;
  }

  async function show(link) {
    const url = new URL(link.href);
    let found;
    try {
      found = target(await pageOf(url), decodeURIComponent(url.hash.slice(1)));
    } catch {
      return;
    }
    if (!found || shownFor !== link) return;
    /* A page without formulas has no MathJax to typeset those of another. */
    const formulas = found.matches(".math") || found.querySelector(".math");
    if (formulas && !window.MathJax) return;
    card?.remove();
    card = document.createElement("aside");
    card.className = CARD;
    card.setAttribute("aria-hidden", "true"); /* the link itself says where it leads */
    card.append(copy(found, url));
    document.body.append(card);
    for (const image of card.querySelectorAll("img")) {
      image.addEventListener("load", () => shownFor === link && place(link));
    }
    place(link);
    if (!card.querySelector("mjx-container") && card.querySelector(".math, .MathJax")) {
      await window.MathJax?.typesetPromise?.([card]);
      if (shownFor === link) place(link);
    }
  }

  function asked(event) {
    const link = event.target.closest?.("main a[href*='#']");
    if (!link || link.matches(".headerlink, .preview-card a") || shownFor === link) return;
    if (new URL(link.href).origin !== location.origin) return;
    hide();
    shownFor = link;
    timer = setTimeout(show, 250, link);
  }

  function left(event) {
    if (shownFor && event.target.closest?.("a") === shownFor) hide();
  }

  if (matchMedia("(hover: hover)").matches) document.addEventListener("mouseover", asked);
  document.addEventListener("mouseout", left);
  document.addEventListener("focusin", (event) => event.target.matches?.(":focus-visible") && asked(event));
  document.addEventListener("focusout", left);
  document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
})();
