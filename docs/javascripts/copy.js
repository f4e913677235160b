// The copy button of a block with commands copies these alone: no "$ " before them, nothing of what they print.
function commands(text) {
  const found = [];
  let goesOn = false;
  for (const line of text.split("\n")) {
    if (goesOn || line.startsWith("$ ")) {
      found.push(goesOn ? line : line.slice(2));
      goesOn = line.endsWith("\\");
    }
  }
  return found.join("\n");
}

// Material's button takes the attribute, where there is one, instead of what is shown.
document.addEventListener("DOMContentLoaded", () => {
  for (const code of document.querySelectorAll(".highlight code")) {
    const typed = commands(code.textContent);
    if (typed) code.setAttribute("data-copy", typed);
  }
});
