// What axe finds in the theme: a label that is not the button's text, and a logo outside of landmarks.
document.addEventListener("DOMContentLoaded", () => {
  for (const button of document.querySelectorAll(".search-button-field")) button.removeAttribute("aria-label");
  const side = document.querySelector(".bd-sidebar-primary");
  if (side) Object.entries({ role: "region", "aria-label": "Site" }).forEach(([name, value]) => side.setAttribute(name, value));
});
