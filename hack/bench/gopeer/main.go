// SPDX-License-Identifier: Apache-2.0

// Gopeer is the yardstick of the benchmark: the least DRA driver for whole GPUs that the official Go helper allows.
//
// It publishes eight made-up devices, reads claims through the helper, refuses a device that another claim holds, writes one
// CDI file a claim and keeps one synced JSON checkpoint of all prepared claims. It controls no hardware and knows no configs,
// so what it costs is a lower bound for its kind. With -cdi-library it writes its CDI files with the CDI library, as public
// drivers do: the library reads all files anew whenever one changes.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
)

type options struct {
	driverName string
	nodeName   string
	kubeconfig string
	kubeletDir string
	cdiDir     string
	cdiLibrary bool
	json       bool
}

func main() {
	var o options
	flag.StringVar(&o.driverName, "driver-name", "peer.nearfield.dev", "name of the driver")
	flag.StringVar(&o.nodeName, "node-name", "", "name of the node, also of its pool")
	flag.StringVar(&o.kubeconfig, "kubeconfig", "", "how to reach the API server; empty: as a pod does")
	flag.StringVar(&o.kubeletDir, "kubelet-dir", "/var/lib/kubelet", "kubelet's directory")
	flag.StringVar(&o.cdiDir, "cdi-dir", "/var/run/cdi", "where CDI specs go")
	flag.BoolVar(&o.cdiLibrary, "cdi-library", false, "write CDI specs with the CDI library")
	flag.BoolVar(&o.json, "json", false, "talk JSON to the API server, not what client-go prefers")
	flag.Parse()
	if err := run(o); err != nil {
		fmt.Fprintln(os.Stderr, "gopeer:", err)
		os.Exit(1)
	}
}

func run(o options) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()

	config, err := loadConfig(o.kubeconfig)
	if err != nil {
		return err
	}
	// As shipped, client-go lets 5 requests a second through; that would be all this benchmark could see.
	config.QPS = -1
	if o.json {
		config.ContentType = runtime.ContentTypeJSON
		config.AcceptContentTypes = runtime.ContentTypeJSON
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}

	registryDir := filepath.Join(o.kubeletDir, "plugins_registry")
	pluginDir := filepath.Join(o.kubeletDir, "plugins", o.driverName)
	for _, dir := range []string{registryDir, pluginDir, o.cdiDir} {
		if err := os.MkdirAll(dir, 0o750); err != nil {
			return err
		}
	}
	state, err := newState(filepath.Join(pluginDir, "checkpoint.json"), o.cdiDir, o.driverName, o.cdiLibrary)
	if err != nil {
		return err
	}
	helper, err := kubeletplugin.Start(ctx, &driver{name: o.driverName, state: state},
		kubeletplugin.KubeClient(client),
		kubeletplugin.NodeName(o.nodeName),
		kubeletplugin.DriverName(o.driverName),
		kubeletplugin.RegistrarDirectoryPath(registryDir),
		kubeletplugin.PluginDataDirectoryPath(pluginDir),
		kubeletplugin.HealthService(false),
	)
	if err != nil {
		return err
	}
	defer helper.Stop()
	if err := helper.PublishResources(ctx, resources(o.nodeName)); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}

// loadConfig keeps the token also for a server without TLS, where clientcmd drops credentials. The stand-in is one.
func loadConfig(kubeconfig string) (*rest.Config, error) {
	if kubeconfig == "" {
		return rest.InClusterConfig()
	}
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return nil, err
	}
	file, err := clientcmd.LoadFromFile(kubeconfig)
	if err != nil {
		return nil, err
	}
	if current, found := file.Contexts[file.CurrentContext]; found {
		if user, found := file.AuthInfos[current.AuthInfo]; found && config.BearerToken == "" {
			config.BearerToken = user.Token
		}
	}
	return config, nil
}
