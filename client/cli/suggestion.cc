#include "client/cli/suggestion.h"

#include <vector>

#include "client/cli/global_options.h"
#include "server/base/edit_distance.h"

namespace weightwire::cli {
namespace {

/// The nearest of `names`, quoted for a question; "" when none is near.
std::string DidYouMean(const std::string& word, const std::vector<std::string>& names) {
  constexpr size_t kNear = 2;
  const std::string* best = nullptr;
  size_t least = kNear + 1;
  for (const std::string& name : names) {
    const bool begins = word.size() > 2 && name.starts_with(word);
    const size_t distance = begins ? 0 : EditDistance(word, name);
    if (distance >= least || distance >= name.size()) continue;
    least = distance;
    best = &name;
  }
  return best == nullptr ? "" : "; did you mean " + *best + "?";
}

std::vector<std::string> CommandsOf(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    names.push_back(command->get_name());
  }
  return names;
}

/// Its own, and those of the commands above it.
std::vector<std::string> OptionsOf(const CLI::App& command) {
  std::vector<std::string> names;
  for (const CLI::App* app = &command; app != nullptr; app = app->get_parent()) {
    for (const CLI::Option* option : app->get_options()) {
      for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
    }
  }
  return names;
}

}  // namespace

std::string UnknownWord(const CLI::App& app) {
  const std::vector<std::string> words = app.remaining(true);
  if (words.empty()) return "";
  const CLI::App& command = ChosenCommand(app);
  const std::string name = FullName(command);
  const std::string help = "; `" + name + " --help` lists them";
  std::string word = words.front();
  if (word.starts_with("-")) {
    word = word.substr(0, word.find('='));
    return "`" + name + "` has no option " + word + DidYouMean(word, OptionsOf(command)) + help;
  }
  const std::vector<std::string> commands = CommandsOf(command);
  if (commands.empty()) return "`" + name + "` takes no '" + word + "'";
  return "`" + name + "` has no command '" + word + "'" + DidYouMean(word, commands) + help;
}

}  // namespace weightwire::cli
