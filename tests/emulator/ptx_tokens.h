// Words and signs of PTX text.
#pragma once

#include <cctype>
#include <stdexcept>
#include <string>
#include <vector>

namespace emulator {

class Tokens {
 public:
  explicit Tokens(const std::string& text) {
    tokens_.reserve(text.size() / 6);
    int line = 1;
    for (size_t i = 0; i < text.size();) {
      const char c = text[i];
      if (c == '\n') ++line;
      if (std::isspace(static_cast<unsigned char>(c)) || c == '\0') {
        ++i;
      } else if (c == '/' && text.compare(i, 2, "//") == 0) {
        while (i < text.size() && text[i] != '\n') ++i;
      } else if (c == '/' && text.compare(i, 2, "/*") == 0) {
        i = text.find("*/", i) + 2;
      } else if (c == '"') {
        const size_t end = text.find('"', i + 1);
        tokens_.push_back({text.substr(i + 1, end - i - 1), line});
        i = end + 1;
      } else if (is_word(c)) {
        size_t end = i;
        while (end < text.size() && (is_word(text[end]) || text.compare(end, 2, "::") == 0)) {
          end += text[end] == ':' ? 2 : 1;
        }
        tokens_.push_back({text.substr(i, end - i), line});
        i = end;
      } else {
        tokens_.push_back({std::string(1, c), line});
        ++i;
      }
    }
    tokens_.push_back({"", line});
  }

  bool at_end() const { return at_ + 1 >= tokens_.size(); }
  const std::string& peek(size_t ahead = 0) const { return tokens_[std::min(at_ + ahead, tokens_.size() - 1)].text; }
  int line() const { return tokens_[at_].line; }
  std::string next() {
    if (at_end()) fail("the text ends too soon");
    return tokens_[at_++].text;
  }
  bool accept(const char* text) {
    if (peek() != text) return false;
    ++at_;
    return true;
  }
  void expect(const char* text) {
    if (!accept(text)) fail(std::string("expected ") + text);
  }
  bool is_label() const { return peek(1) == ":"; }

  // Labels up to the end of a scope that has just been opened, not those of scopes inside it.
  std::vector<std::string> labels_of_scope() const {
    std::vector<std::string> labels;
    int depth = 1;
    for (size_t i = at_; depth > 0 && i + 1 < tokens_.size(); ++i) {
      if (tokens_[i].text == "{") ++depth;
      if (tokens_[i].text == "}") --depth;
      if (depth == 1 && tokens_[i + 1].text == ":") labels.push_back(tokens_[i].text);
    }
    return labels;
  }

  // ".section name { ... }"
  void skip_section() {
    while (next() != "{") {
    }
    while (next() != "}") {
    }
  }

  [[noreturn]] void fail(const std::string& what) const {
    throw std::runtime_error("PTX line " + std::to_string(tokens_[at_].line) + ": " + what + " at '" + peek() + "'");
  }

 private:
  struct Token {
    std::string text;
    int line;
  };
  static bool is_word(char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%' || c == '.';
  }
  std::vector<Token> tokens_;
  size_t at_ = 0;
};

}  // namespace emulator
