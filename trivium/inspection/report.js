// Numbers under the pointer, in the legend of each chart; away from it, the newest ones again.
for (const svg of document.querySelectorAll("svg[data-points]")) {
  const curves = JSON.parse(svg.dataset.points);
  const [left, right, first, last] = svg.dataset.frame.split(",").map(Number);
  const figures = [...svg.closest("figure").querySelectorAll(".legend b")];
  const newest = figures.map((figure) => figure.textContent);
  const caption = svg.closest("figure").querySelector("figcaption");
  const title = caption.textContent;
  const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
  for (const [name, value] of Object.entries({ class: "cursor", y1: 8, y2: 168, visibility: "hidden" })) line.setAttribute(name, value);
  svg.append(line);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    const wanted = first + ((x - left) / (right - left)) * Math.max(1, last - first);
    let step = null;
    curves.forEach(([steps, values], number) => {
      let at = 0;
      steps.forEach((each, place) => { if (Math.abs(each - wanted) < Math.abs(steps[at] - wanted)) at = place; });
      figures[number].textContent = String(values[at]);
      if (step === null || Math.abs(steps[at] - wanted) < Math.abs(step - wanted)) step = steps[at];
    });
    caption.textContent = `${title} · step ${step}`;
    const place = left + ((step - first) / Math.max(1, last - first)) * (right - left);
    line.setAttribute("x1", place);
    line.setAttribute("x2", place);
    line.setAttribute("visibility", "visible");
  });
  svg.addEventListener("pointerleave", () => {
    figures.forEach((figure, number) => { figure.textContent = newest[number]; });
    caption.textContent = title;
    line.setAttribute("visibility", "hidden");
  });
}
