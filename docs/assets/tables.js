// On a phone a table's head is hidden: each cell says itself which column it is of. A key is never broken at its hyphens.
document.querySelectorAll(".md-typeset table:not([class])").forEach(table => {
  const columns = [...table.querySelectorAll("thead th")].map(head => head.textContent.trim())
  table.querySelectorAll("tbody tr").forEach(row =>
    [...row.children].forEach((cell, i) => columns[i] && (cell.dataset.column = columns[i])))
  table.querySelectorAll("td code").forEach(code => {
    if (/^[^\s,]{1,39}$/.test(code.textContent)) code.style.whiteSpace = "nowrap"
  })
})
