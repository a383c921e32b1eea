"use strict";
// Tables that sort, filter and open. Every text from the data is set as text, never as markup.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);

  const made = (name, attributes = {}, text = "") => {
    const element = Object.assign(document.createElement(name), attributes);
    if (text) element.textContent = text;
    return element;
  };

  const collator = new Intl.Collator("en", { numeric: true });

  // A cell's value: its number in full, or its text; what is missing comes last in both directions.
  const valueOf = (cell) => {
    if (!cell.classList.contains("number")) return cell.textContent || null;
    const value = Number(cell.dataset.value);
    return cell.dataset.value === undefined || Number.isNaN(value) ? null : value;
  };

  const compare = (one, other) =>
    typeof one === "number" ? one - other : collator.compare(one, other);

  const enliven = (table) => {
    const section = table.closest("section");
    const body = table.tBodies[0];
    const rows = [...body.rows];
    const opened = new Map(); // a row's details, once they were asked for
    const count = made("output");

    const place = (ordered) => {
      const all = ordered.flatMap((row) => (opened.has(row) ? [row, opened.get(row)] : [row]));
      body.replaceChildren(...all);
    };

    let ordered = rows;
    const sortBy = (heading) => {
      const before = heading.getAttribute("aria-sort");
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      if (before === "descending") {
        ordered = rows;
      } else {
        const sign = before === "ascending" ? -1 : 1;
        const keyed = rows.map((row) => [valueOf(row.cells[heading.cellIndex]), row]);
        keyed.sort(([one], [other]) => {
          if (one === null || other === null) return (one === null) - (other === null);
          return sign * compare(one, other);
        });
        ordered = keyed.map(([, row]) => row);
        heading.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
      }
      place(ordered);
    };

    for (const heading of table.tHead.rows[0].cells) {
      if (heading.classList.contains("opener")) continue;
      const button = made("button", { type: "button", title: "sort" }, heading.textContent);
      button.addEventListener("click", () => sortBy(heading));
      heading.replaceChildren(button);
    }

    const texts = rows.map((row) => row.textContent.toLowerCase());
    const filter = (written) => {
      const words = written.toLowerCase().split(/\s+/).filter(Boolean);
      let left = 0;
      rows.forEach((row, index) => {
        row.hidden = !words.every((word) => texts[index].includes(word));
        if (opened.has(row)) opened.get(row).hidden = row.hidden || !isOpen(row);
        left += !row.hidden;
      });
      const all = rows.length === 1 ? "1 row" : `${rows.length} rows`;
      count.textContent = left === rows.length ? all : `${left} of ${all}`;
    };

    const isOpen = (row) => row.cells[0].querySelector("button").ariaExpanded === "true";

    const open = (row, details, button) => {
      if (!opened.has(row)) {
        const list = made("dl");
        for (const [heading, text] of Object.entries(details)) {
          const className = heading === "Command" ? "command" : "";
          list.append(made("dt", {}, heading), made("dd", { className }, data.texts[text]));
        }
        const more = made("tr", { className: "details" });
        more.append(made("td", { colSpan: row.cells.length }));
        more.cells[0].append(list);
        opened.set(row, more);
        row.after(more);
      }
      button.ariaExpanded = String(button.ariaExpanded !== "true");
      opened.get(row).hidden = button.ariaExpanded !== "true";
    };

    if (table.tHead.rows[0].cells[0].classList.contains("opener")) {
      rows.forEach((row, index) => {
        const button = made("button", { type: "button", title: "settings and command", ariaExpanded: "false" }, "›");
        button.addEventListener("click", () => open(row, data.rows[index], button));
        row.cells[0].prepend(button);
      });
    }

    const tools = made("div", { className: "tools" });
    const search = made("input", { type: "search", placeholder: "Filter rows", ariaLabel: "filter rows" });
    search.addEventListener("input", () => filter(search.value));
    tools.append(search, count);
    if (table.querySelector(".more")) {
      const all = made("input", { type: "checkbox" });
      const label = made("label");
      label.append(all, " all columns");
      all.addEventListener("change", () => table.classList.toggle("fewer", !all.checked));
      table.classList.add("fewer");
      tools.append(label);
    }
    section.insertBefore(tools, table.closest(".scroll"));
    filter("");
  };

  document.querySelectorAll("section table").forEach(enliven);
})();
