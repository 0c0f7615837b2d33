/* What counts in a search. Sphinx puts this file in its script: html_search_scorer in _config.yml. */
var Scorer = {
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
  /* A page with the words in its title first, that of a part before its chapters; names of the
     package, and lists, after the pages. */
  score: ([page, title, anchor, object, score]) => {
    const query = new URLSearchParams(location.search).get("q") || "";
    const words = query.toLowerCase().split(/\s+/).filter(Boolean);
    if (object || page.startsWith("book/api/")) score -= 30;
    if (page === "book/equation-index" || page === "book/bibliography") score -= 15;
    if (!anchor && words.every((word) => title.toLowerCase().includes(word)))
      score += page.startsWith("book/parts/") ? 25 : 20;
    return score;
  },
};
