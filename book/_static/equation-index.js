/* Filters of the equation index: by part, by what a result was held against, and by a word. */

(() => {
  const entries = [...document.querySelectorAll(".equation-entry")].map((node) => ({
    node,
    part: node.closest("section").parentElement.closest("section").querySelector("h2"),
    against: [...node.querySelectorAll("li")].map((item) => item.textContent.trim().replace(/, 10\S*$/, "")),
    text: node.querySelector("p").textContent.toLowerCase(),
  }));
  if (!entries.length) return;

  const heading = ({ part }) => part.firstChild.textContent.trim();
  const count = (values) => values.reduce((map, value) => map.set(value, (map.get(value) || 0) + 1), new Map());
  const option = ([name, times]) => `<option value="${name.replace(/"/g, "&quot;")}">${name} (${times})</option>`;
  const parts = [...count(entries.map(heading))];
  const references = [...count(entries.flatMap((entry) => entry.against))].sort((a, b) => b[1] - a[1]);

  const form = document.createElement("form");
  form.className = "equation-filter";
  form.innerHTML = `
    <label>Part <select name="part"><option value="">all</option>${parts.map(option).join("")}</select></label>
    <label>Held against <select name="against"><option value="">anything</option>${references.map(option).join("")}</select></label>
    <label>Word <input name="word" type="search" placeholder="smoother"></label>
    <output></output>`;
  const first = entries[0].node.closest("section").parentElement;
  first.before(form);

  function filter() {
    const { part, against, word } = Object.fromEntries(new FormData(form));
    let shown = 0;
    for (const entry of entries) {
      const fits =
        (!part || heading(entry) === part) &&
        (!against || entry.against.includes(against)) &&
        entry.text.includes(word.trim().toLowerCase());
      entry.node.hidden = !fits;
      shown += fits;
    }
    for (const folded of first.parentElement.querySelectorAll("details")) {
      folded.open = Boolean(part || against || word.trim());
    }
    for (const section of first.parentElement.querySelectorAll("section")) {
      section.hidden = !section.querySelector(".equation-entry:not([hidden])");
    }
    form.querySelector("output").textContent = `${shown} of ${entries.length} results`;
  }

  form.addEventListener("input", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  filter();
})();
