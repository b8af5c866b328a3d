// Sets the equations that pymdownx.arithmatex leaves as \(…\) and \[…\], with the KaTeX beside this file. Then lets the keyboard
// reach what scrolls by itself: code, equations, tables.
document.querySelectorAll(".arithmatex").forEach((element) => {
  const text = element.textContent.trim()
  katex.render(text.slice(2, -2), element, { displayMode: text.startsWith("\\["), throwOnError: false })
})

const reach = () => document.querySelectorAll("pre > code, .arithmatex, .md-typeset__scrollwrap").forEach((element) => {
  if (element.scrollWidth > element.clientWidth) element.tabIndex = 0
})
addEventListener("load", reach)
addEventListener("resize", reach)
