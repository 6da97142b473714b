#include "client/cli/completion.h"

#include <set>

namespace weightwire::cli {
namespace {

/// The lines of two `case`s: which words name a command, and what may follow it.
struct Cases {
  std::string commands;         ///< `"layout"|"layout show"`
  std::string words;            ///< `"layout") words="show --help" ;;`
  std::set<std::string> takes;  ///< options that are followed by a value
};

void Collect(const CLI::App& app, const std::string& path, Cases& cases) {
  std::string words;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    const std::string below = (path.empty() ? "" : path + " ") + command->get_name();
    cases.commands += (cases.commands.empty() ? "\"" : "|\"") + below + "\"";
    words += (words.empty() ? "" : " ") + command->get_name();
    Collect(*command, below, cases);
  }
  // A command takes the options above it, too; one that only groups others is not asked for them.
  const bool leaf = app.get_subcommands([](const CLI::App*) { return true; }).empty();
  for (const CLI::App* from = &app; from != nullptr; from = leaf ? from->get_parent() : nullptr) {
    for (const CLI::Option* option : from->get_options()) {
      for (const std::string& name : option->get_lnames()) {
        if (from != &app && (name == "help" || name == "version")) continue;
        words += (words.empty() ? "--" : " --") + name;
        if (option->get_items_expected_max() > 0) cases.takes.insert("--" + name);
      }
    }
  }
  if (path == "completion") words = "bash zsh " + words;
  cases.words += "    \"" + path + "\") words=\"" + words + "\" ;;\n";
}

}  // namespace

std::string CompletionScript(const CLI::App& app, const std::string& shell) {
  Cases cases;
  Collect(app, "", cases);
  std::string takes;
  for (const std::string& option : cases.takes) takes += (takes.empty() ? "" : "|") + option;
  std::string script;
  if (shell == "zsh") script = "autoload -U +X compinit bashcompinit && compinit && bashcompinit\n";
  return script + R"(_wwctl() {
  local path="" word words="" i
  for ((i = 1; i < COMP_CWORD; i++)); do
    word="${path:+$path }${COMP_WORDS[i]}"
    case "$word" in )" +
         cases.commands + R"() path="$word" ;; esac
  done
  COMPREPLY=()
  case "${COMP_WORDS[COMP_CWORD-1]}" in )" +
         takes + R"() return ;; esac
  case "$path" in
)" + cases.words +
         R"(  esac
  COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F _wwctl wwctl
)";
}

}  // namespace weightwire::cli
