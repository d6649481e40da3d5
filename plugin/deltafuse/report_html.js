
"use strict";
(() => {
  const all = () => [...document.querySelectorAll("details")];
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = all().filter((part) => !part.open);
    for (const part of opened) part.open = true;
  });
  addEventListener("afterprint", () => {
    for (const part of opened) part.open = false;
  });
  const openTarget = () => {
    const id = decodeURIComponent(location.hash.slice(1));
    const part = id && document.getElementById(id);
    if (part && part.tagName === "DETAILS") part.open = true;
  };
  addEventListener("hashchange", openTarget);
  openTarget();
  const button = document.getElementById("open-all");
  button.hidden = false;
  button.addEventListener("click", () => {
    const open = button.textContent === "Open all";
    for (const part of all()) part.open = open;
    button.textContent = open ? "Close all" : "Open all";
  });
})();
