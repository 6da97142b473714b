#include "client/cli/checkpoint_commands.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "client/cli/exit_codes.h"

namespace weightwire::cli {
namespace {

constexpr const char* kPython = "WEIGHTWIRE_PYTHON";
constexpr const char* kBinaries = "WEIGHTWIRE_BIN_DIR";

constexpr const char* kCheckpoint = "weightwire.checkpoint";
constexpr const char* kStore = "weightwire.store";

/// `python -m MODULE`, but that a Python without it is told what to do.
std::string Program(const std::string& module) {
  return "import sys\n"
         "try:\n"
         "    from " +
         module +
         ".__main__ import main\n"
         "except ImportError as error:\n"
         "    print(f'wwctl: {sys.executable} cannot import " +
         module +
         ": {error}; install "
         "the weightwire package there (./dev wheel builds it), or name a Python that has it in "
         "WEIGHTWIRE_PYTHON', file=sys.stderr)\n"
         "    sys.exit(" +
         std::to_string(ExitCode(Reason::kConfigInvalid)) +
         ")\n"
         "sys.exit(main(prog='wwctl'))\n";
}

/// Returns only when there is no such Python.
Status BecomePython(const std::string& module, std::vector<std::string> arguments) {
  const char* named = std::getenv(kPython);
  std::string python = named != nullptr && *named != '\0' ? named : "python3";
  std::error_code ignored;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", ignored);
  if (!self.empty()) setenv(kBinaries, self.parent_path().c_str(), /*overwrite=*/0);
  std::vector<std::string> words = {python, "-c", Program(module)};
  std::move(arguments.begin(), arguments.end(), std::back_inserter(words));
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  execvp(argv[0], argv.data());
  return Status(Code::kFailedPrecondition, Reason::kConfigInvalid,
                "cannot run '" + python + "': " + std::strerror(errno))
      .Remedy(
          "checkpoints and stores are read and written by the Python package weightwire: name a "
          "Python that has it in WEIGHTWIRE_PYTHON");
}

}  // namespace

CheckpointCommands::CheckpointCommands(CLI::App& app, Command& chosen) : app_(app) {
  const auto add = [&](const std::string& name, const std::string& about,
                       const std::string& module = kCheckpoint) {
    names_.push_back(name);
    app.add_subcommand(name, about)->callback([this, &chosen, name, module] {
      chosen = [this, name, module]() -> Result<std::string> {
        if (module == kCheckpoint) arguments_.insert(arguments_.begin(), name);
        return Fail(BecomePython(module, arguments_));
      };
    });
  };
  add("compact", "Store a checkpoint whole that is stored as what changed (Python)");
  add("convert", "Write a checkpoint in another format and layout (Python)");
  add("delta", "What changed between two checkpoints, and what it takes to send it (Python)");
  add("load", "Start engines from a checkpoint or a peer, or try what a rank would load (Python)");
  add("push", "Publish a checkpoint as a version (Python)");
  add("quantize", "How far two checkpoints are apart, one of them or both quantized (Python)");
  add("save", "Write out the version that engines serve (Python)");
  add("store", "Versions in object storage, for engines of other regions (Python)", kStore);
}

int CheckpointCommands::TakeArguments(int argc, char** argv) {
  std::vector<std::string> before;
  int at = 1;
  for (; at < argc && argv[at][0] == '-'; ++at) {
    const std::string word = argv[at];
    const size_t equals = word.find('=');
    const CLI::Option* option = app_.get_option_no_throw(word.substr(0, equals));
    if (option == nullptr) return argc;
    before.push_back(word.starts_with("--address") ? "--coordinator" + word.substr(9) : word);
    const bool value_follows =
        equals == std::string::npos && option->get_items_expected_max() > 0 && at + 1 < argc;
    if (value_follows) before.emplace_back(argv[++at]);
  }
  if (at == argc || std::find(names_.begin(), names_.end(), argv[at]) == names_.end()) return argc;
  arguments_.assign(argv + at + 1, argv + argc);
  arguments_.insert(arguments_.end(), before.begin(), before.end());
  argv[1] = argv[at];  // the options before it are Python's now
  return 2;
}

}  // namespace weightwire::cli
