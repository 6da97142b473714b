#include "client/cli/offline_commands.h"

namespace weightwire::cli {

OfflineCommands::OfflineCommands(CLI::App& app, GlobalOptions& globals, Command& chosen)
    : globals_(globals), chosen_(chosen) {
  AddPlan(app);
  AddSimulate(app);
  AddLayout(app);
}

void OfflineCommands::AddPlan(CLI::App& app) {
  CLI::App* command =
      app.add_subcommand("plan", "Plan and prove a transfer offline, from a model's config.json");
  command->callback([this] {
    chosen_ = [this] {
      plan_.per_class = per_ == "class";
      plan_.json = globals_.json();
      return RunOfflinePlan(plan_);
    };
  });
  command->add_option("--config", plan_.config_path, "config.json of the model")->required();
  command->add_option("--from", plan_.from, "Source layout, e.g. megatron:tp2,pp2")->required();
  command->add_option("--to", plan_.to, "Target layout, e.g. vllm:tp4, hf")->required();
  command
      ->add_option("--per", per_,
                   "class: one copy for all target ranks with equal layouts, which relays hand on; "
                   "rank: a copy for each")
      ->check(CLI::IsMember({"class", "rank"}))
      ->capture_default_str();
  command->add_flag("--explain", plan_.explain, "Also bytes of every rank");
  command->add_flag("--egress", plan_.egress,
                    "Also bytes that a coordinator sends to agents for it");
  command->add_option("--tensor", plan_.tensor, "Explain every copy of this Hugging Face tensor");
  command->add_option("--svg", plan_.svg_path, "Draw the bytes from each source to each target");
  CLI::Option* out = command->add_option("--out", plan_.out_path, "Write the plan to this file");
  command
      ->add_option("--verify", plan_.verify_path,
                   "Prove the plan in this file, which --out has written, instead of planning")
      ->excludes(out);
  globals_.Allow(*command, GlobalOptions::kJson);
}

void OfflineCommands::AddSimulate(CLI::App& app) {
  CLI::App* command =
      app.add_subcommand("simulate", "Predict how long one version takes, with given links");
  command->callback([this] {
    chosen_ = [this] {
      simulate_.json = globals_.json();
      return RunSimulate(simulate_);
    };
  });
  command->add_option("--config", simulate_.config_path, "config.json of the model")->required();
  command->add_option("--from", simulate_.from, "Source layout")->required();
  command->add_option("--to", simulate_.to, "Target layout")->required();
  command
      ->add_option("--gbps", simulate_.gigabits_per_second,
                   "Gigabits per second of every rank's link, each way at once")
      ->required()
      ->check(Real(0.001, 1e6));
  command->add_option("--latency-us", simulate_.latency_us, "Microseconds per hop")
      ->check(Real(0, 1e9))
      ->capture_default_str();
  command
      ->add_option("--topology", simulate_.topology,
                   "How ranks with equal layouts are fed: star: all by the sources; chain, tree: "
                   "the first by the sources, the others by each other")
      ->check(CLI::IsMember({"star", "chain", "tree"}))
      ->capture_default_str();
  command
      ->add_option(
          "--sharing", simulate_.sharing,
          "How streams share a link: in proportion to their bytes, as the engine does, or all "
          "equally")
      ->check(CLI::IsMember({"bytes", "equal"}))
      ->capture_default_str();
  globals_.Allow(*command, GlobalOptions::kJson);
}

void OfflineCommands::AddLayout(CLI::App& app) {
  CLI::App* layout = app.add_subcommand("layout", "What each rank should hold, offline");
  layout->require_subcommand(1);
  CLI::App* show =
      AddLayoutCommand(*layout, "show", "Ranks, or the tensors of one, or of a name", ShowLayout);
  show->add_option("--rank", layout_.rank, "Only this rank, with its tensors")
      ->transform(Whole(0, UINT32_MAX));
  show->add_option("--tensor", layout_.tensor,
                   "Only tensors whose local or Hugging Face name matches this shell pattern");
  CLI::App* diff =
      AddLayoutCommand(*layout, "diff", "Compare with what a process holds", DiffLayout);
  diff->add_option("--observed", layout_.observed_path,
                   "JSON {name: [dtype, shape]}, or a safetensors file")
      ->required();
  diff->add_option("--rank", layout_.rank, "The rank that was observed, default 0")
      ->transform(Whole(0, UINT32_MAX));
  AddLayoutCommand(*layout, "lint", "Whether a layout is legal, its sizes, and what to know of it",
                   LintLayout);
}

CLI::App* OfflineCommands::AddLayoutCommand(CLI::App& layout, const std::string& name,
                                            const std::string& about,
                                            Result<std::string> (*run)(const LayoutRequest&)) {
  CLI::App* command = layout.add_subcommand(name, about);
  command->callback([this, run] {
    chosen_ = [this, run] {
      layout_.json = globals_.json();
      return run(layout_);
    };
  });
  command->add_option("--config", layout_.config_path, "config.json of the model")->required();
  command->add_option("--spec", layout_.spec, "Layout, e.g. vllm:tp4")->required();
  globals_.Allow(*command, GlobalOptions::kJson);
  return command;
}

}  // namespace weightwire::cli
