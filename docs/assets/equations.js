// Sets the equations that pymdownx.arithmatex leaves as \(…\) and \[…\], with the KaTeX beside this file.
document.querySelectorAll(".arithmatex").forEach((element) => {
  const text = element.textContent.trim()
  katex.render(text.slice(2, -2), element, { displayMode: text.startsWith("\\["), throwOnError: false })
})
