"use strict";
// A flame graph: a row of frames below each other, as wide as the bytes that they hold at a moment of the step.
// Texts are set as text.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const [which, search, invert, out, told, frames, kinds] = ["which", "search", "invert", "out", "told", "frames", "kinds"]
    .map((id) => document.getElementById(id));
  const [over, bars, moment, when, toPeak] = ["over", "bars", "moment", "when", "top"]
    .map((id) => document.getElementById(id));
  const HEIGHT = 21;

  const amount = (bytes) => {
    const unit = ["GiB", "MiB", "KiB"].find((_, place) => bytes >= 1024 ** (3 - place));
    const factor = { GiB: 1024 ** 3, MiB: 1024 ** 2, KiB: 1024 }[unit] ?? 1;
    return unit ? `${(bytes / factor).toFixed(2)} ${unit}` : `${bytes} B`;
  };

  const node = (name, parent) => ({ name, parent, bytes: 0, tensors: 0, kinds: new Map(), below: new Map() });

  const placeOfPeak = (graph) => graph.moments.findIndex(([at]) => at === graph.peak[0]);

  // The stacks of what is alive at a moment; a reading holds until the next one.
  const stacksAt = (graph, place) => {
    if (!graph.moments.length || place === placeOfPeak(graph)) return graph.stacks;
    return graph.sampled.flatMap(([names, kind, readings]) => {
      const [, bytes, tensors] = readings.findLast(([from]) => from <= place) ?? [0, 0, 0];
      return bytes ? [[names, kind, bytes, tensors]] : [];
    });
  };

  const tree = (graph, place, inverted) => {
    const root = node(graph.name, null);
    for (const [names, kind, bytes, tensors] of stacksAt(graph, place)) {
      let at = root;
      for (const name of [null, ...(inverted ? names.toReversed() : names)]) {
        if (name !== null) {
          if (!at.below.has(name)) at.below.set(name, node(name, at));
          at = at.below.get(name);
        }
        at.bytes += bytes;
        at.tensors += tensors;
        at.kinds.set(kind, (at.kinds.get(kind) ?? 0) + bytes);
      }
    }
    return root;
  };

  let graph, root, zoomed;

  const ofPeak = (bytes) => `${((100 * bytes) / (graph.peak[2] || 1)).toFixed(1)} % of the peak`;

  const colour = (each) => (each.kinds.size === 1 ? data.kinds[each.kinds.keys().next().value] : "");

  const put = (each, depth, left, width, isThrough) => {
    const frame = document.createElement("button");
    frame.type = "button";
    frame.textContent = each.name;
    const parts = [...each.kinds].map(([kind, bytes]) => `${kind} ${amount(bytes)}`).join(", ");
    frame.title = `${each.name}\n${amount(each.bytes)}, ${ofPeak(each.bytes)}, ${each.tensors} tensors\n${parts}`;
    frame.dataset.bytes = each.bytes;
    Object.assign(frame.style, { left: `${left}%`, width: `${width}%`, top: `${depth * HEIGHT}px` });
    if (colour(each)) frame.style.background = colour(each);
    else frame.className = "through";
    if (isThrough) frame.classList.add("above");
    frame.addEventListener("click", () => zoom(each));
    frames.append(frame);
  };

  const draw = () => {
    frames.replaceChildren();
    const above = [];
    for (let each = zoomed.parent; each; each = each.parent) above.unshift(each);
    above.forEach((each, depth) => put(each, depth, 0, 100, true));
    let deepest = above.length;
    const whole = (zoomed === root ? graph.peak[2] : zoomed.bytes) || 1; // so that a step's frames shrink and grow
    const below = (each, depth, left) => {
      const width = (100 * each.bytes) / whole;
      if (width < 0.05) return; // less than a pixel
      deepest = Math.max(deepest, depth);
      put(each, depth, left, width, false);
      let at = left;
      for (const child of [...each.below.values()].sort((one, other) => other.bytes - one.bytes)) {
        below(child, depth + 1, at);
        at += (100 * child.bytes) / whole;
      }
    };
    below(zoomed, above.length, 0);
    frames.style.height = `${(deepest + 1) * HEIGHT}px`;
    out.hidden = zoomed === root;
    mark();
  };

  // What a search finds: frames whose names hold all words, and the bytes below them, each counted once.
  const mark = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const isFound = (name) => words.every((word) => name.toLowerCase().includes(word));
    for (const frame of frames.children)
      frame.classList.toggle("faint", words.length > 0 && !isFound(frame.textContent));
    const found = (each) =>
      each !== root && isFound(each.name) ? each.bytes : [...each.below.values()].reduce((sum, child) => sum + found(child), 0);
    const bytes = words.length ? found(root) : zoomed.bytes;
    told.textContent = `${amount(bytes)}, ${ofPeak(bytes)}`;
  };

  const zoom = (each) => {
    zoomed = each;
    draw();
  };

  // The frame of these names, or the innermost one of them that there is.
  const found = (names) => {
    let at = root;
    for (const name of names) {
      if (!at.below.has(name)) break;
      at = at.below.get(name);
    }
    return at;
  };

  const path = (each) => (each.parent ? [...path(each.parent), each.name] : []);

  const show = (names) => {
    const place = Number(moment.value);
    root = tree(graph, place, invert.checked);
    kinds.replaceChildren(
      ...[...root.kinds].map(([kind, bytes]) => {
        const item = document.createElement("li");
        const box = document.createElement("i");
        box.style.background = data.kinds[kind];
        item.append(box, `${kind} ${amount(bytes)}`);
        return item;
      }),
    );
    [...bars.children].forEach((bar, at) => bar.classList.toggle("now", at === place));
    const [at, phase, bytes] = graph.moments[place] ?? graph.peak;
    const isPeak = at === graph.peak[0];
    when.textContent = `${isPeak ? "the peak, " : ""}after ${at} of ${graph.events} allocations and frees, ${phase}: ${amount(bytes)}`;
    toPeak.hidden = isPeak;
    zoom(found(names));
  };

  const open = () => {
    graph = data.graphs[which.value];
    over.hidden = graph.moments.length < 2;
    moment.max = String(graph.moments.length - 1);
    moment.value = String(placeOfPeak(graph));
    bars.replaceChildren(
      ...graph.moments.map(([, , bytes]) => {
        const bar = document.createElement("i");
        bar.style.height = `${(100 * bytes) / (graph.peak[2] || 1)}%`;
        return bar;
      }),
    );
    show([]);
  };

  data.graphs.forEach((each, place) => which.append(new Option(each.name, place)));
  which.addEventListener("change", open);
  invert.addEventListener("change", () => show([]));
  moment.addEventListener("input", () => show(path(zoomed)));
  toPeak.addEventListener("click", () => {
    moment.value = String(placeOfPeak(graph));
    show(path(zoomed));
  });
  search.addEventListener("input", mark);
  out.addEventListener("click", () => zoom(root));
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") zoom(root);
  });
  open();
})();
