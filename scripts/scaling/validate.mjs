// Validates documents, a JSON list on standard input, by the schemas of the kinds' own projects; prints what is wrong.
//   node validate.mjs FOLDER-OF-PACKAGES
import { readFileSync } from "node:fs";
import { resolve } from "node:path";
import { pathToFileURL } from "node:url";

const packages = resolve(process.argv[2], "node_modules/@kubernetes-models");
const PACKAGES = {
  "gateway.networking.k8s.io": ["gateway-api", "IoK8sSigsGatewayApiApis"],
  "gateway.envoyproxy.io": ["envoy-gateway", "ComGithubEnvoyproxyGatewayApi"],
  "monitoring.coreos.com": ["prometheus-operator", "ComGithubPrometheusOperatorPrometheusOperatorPkgApisMonitoring"],
};

for (const document of JSON.parse(readFileSync(0, "utf8"))) {
  const [group, version] = document.apiVersion.split("/");
  const [name, prefix] = PACKAGES[group];
  const schema = prefix + version[0].toUpperCase() + version.slice(1) + document.kind;
  const { validate } = await import(pathToFileURL(`${packages}/${name}/_schemas/${schema}.js`));
  if (!validate(document))
    for (const { instancePath, keyword, params } of validate.errors)
      console.log(`${document.kind} ${document.metadata.name}${instancePath}: ${keyword} ${JSON.stringify(params)}`);
}
