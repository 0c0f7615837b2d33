/* Small mends of what the theme's scripts do. */

/* A link into a folded solution, or to the title of one, opens it. */
function unfold() {
  const id = decodeURIComponent(location.hash.slice(1));
  let at = id && document.getElementById(id);
  if (!at) return;
  let opened = false;
  for (; at; at = at.parentElement) {
    if (at.matches("details:not([open])")) opened = at.open = true;
    if (at.matches(".toggle-hidden")) {
      const button = at.querySelector("button.toggle-button");
      if (button) button.click();
      opened = true;
    }
  }
  if (opened) document.getElementById(id).scrollIntoView();
}
window.addEventListener("hashchange", unfold);
window.addEventListener("load", () => setTimeout(unfold));

/* What scrolls sideways on a phone can be reached, and scrolled, by keyboard. */
function reachable() {
  for (const at of document.querySelectorAll(".picture, span.math")) {
    if (at.scrollWidth > at.clientWidth) at.tabIndex = 0;
    else at.removeAttribute("tabindex");
  }
}
window.addEventListener("resize", reachable);
window.addEventListener("load", async () => {
  await window.MathJax?.startup?.promise;
  reachable();
});

/* What a search shows of a page is text: a formula becomes an ellipsis. */
if (typeof Search !== "undefined") {
  const toText = Search.htmlToText;
  Search.htmlToText = (html, anchor) =>
    toText(html, anchor)
      .replace(/\\\[[\s\S]*?\\\]/g, " … ")
      .replace(/\\\([\s\S]*?\\\)/g, "…");
}
