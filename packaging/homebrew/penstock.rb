# A formula for a tap of this project: python wheels come from the package index, as a source
# build of MLX takes Xcode. `tools/release.py formula` writes url and sha256 of a release.
class Penstock < Formula
  desc "LLM serving on MLX inside a fixed amount of memory"
  homepage "https://pypi.org/project/penstock-mlx/"
  url "https://files.pythonhosted.org/packages/00/00/000000000000000000000000000000000000000000000000000000000000/penstock_mlx-0.2.0.tar.gz"
  sha256 "0000000000000000000000000000000000000000000000000000000000000000"
  license "MIT"

  depends_on arch: :arm64
  depends_on macos: :sonoma
  depends_on "python@3.13"

  def install
    system formula_opt_bin("python@3.13")/"python3.13", "-m", "venv", libexec
    system libexec/"bin/pip", "install", "--prefer-binary", buildpath
    bin.install_symlink libexec/"bin/penstock"
  end

  service do
    run [opt_bin/"penstock", "serve"]
    keep_alive successful_exit: false
    log_path var/"log/penstock.log"
    error_log_path var/"log/penstock.log"
    environment_variables PATH: std_service_path_env
    process_type :interactive
    stop_timeout 90
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/penstock --version")
    asked = "The code of the amber falcon is 4821. What is the code of the amber falcon?"
    assert_match "4821", shell_output("#{bin}/penstock generate '#{asked}'")
  end
end
